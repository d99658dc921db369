"""What must not be loaded of a model is named before anything is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl.models.hub import local_path
from verl.models.model_safety import model_problems

pytestmark = pytest.mark.unit


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize("shard", ["../../x", "/etc/x", "sub/x", "..", "", "..\\x", "C:x", 3])
def test_a_shard_outside_the_folder_of_its_index_is_reported(tmp_path: Path, shard: Any) -> None:
    write(tmp_path, "model.safetensors.index.json", {"weight_map": {"a": "model-1.safetensors", "b": shard}})
    (problem,) = model_problems(str(tmp_path))
    assert f"names the shard {str(shard)!r}" in problem


def test_an_ordinary_model_has_no_problems(tmp_path: Path) -> None:
    write(tmp_path, "model.safetensors.index.json", {"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    write(tmp_path, "config.json", {"model_type": "qwen2", "attn_implementation": "sdpa"})
    assert [*model_problems(str(tmp_path))] == []
    assert [*model_problems("Qwen/Qwen2.5-0.5B-Instruct")] == []


@pytest.mark.parametrize("content", [[], {"weight_map": ["x"]}, {}])
def test_a_file_that_is_not_an_index_of_weights_is_reported(tmp_path: Path, content: Any) -> None:
    write(tmp_path, "pytorch_model.bin.index.json", content)
    (problem,) = model_problems(str(tmp_path))
    assert "is not an index of weights" in problem


@pytest.mark.parametrize(
    "config",
    [
        {"attn_implementation": "evil/kernel"},
        {"text_config": {"_attn_implementation": "evil/kernel"}},
        {"attn_implementation": {"": "sdpa", "vision": "evil/kernel:f"}},
    ],
)
def test_a_kernel_of_another_repository_is_reported_as_code(tmp_path: Path, config: Any) -> None:
    write(tmp_path, "config.json", config)
    (problem,) = model_problems(str(tmp_path))
    assert "'evil/kernel" in problem
    assert "trust_remote_code=True" in problem
    assert [*model_problems(str(tmp_path), trust_remote_code=True)] == []


def test_a_model_of_the_hub_is_checked_in_its_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--someone--evil" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123")
    write(snapshot, "config.json", {"model_type": "qwen2"})
    write(snapshot, "model.safetensors.index.json", {"weight_map": {"a": "../../x"}})
    assert local_path("someone/evil") == str(snapshot)
    (problem,) = model_problems(local_path("someone/evil"))
    assert "'../../x'" in problem
    assert local_path("someone/else") == "someone/else"
    assert local_path(str(tmp_path)) == str(tmp_path)
