"""The weights for `from_pretrained` that a checkpoint has by default: it is complete without them."""

from pathlib import Path

import pytest

from verl.errors import CheckpointError
from verl.workers.train import TrainWorker

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("error", [OSError("No space left on device"), CheckpointError("the merged weights differ")])
def test_weights_that_nobody_asked_for_do_not_prevent_a_save(tmp_path, monkeypatch, caplog, error):
    folder = tmp_path / "actor" / "huggingface"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")

    def fail(self: TrainWorker, directory: Path) -> None:
        (folder / "model.safetensors").write_text("part")
        raise error

    monkeypatch.setattr(TrainWorker, "_write_merged", fail)
    assert TrainWorker(0, 1)._try_to_write_merged(tmp_path) == {}
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    assert f"{error}" in caplog.text
