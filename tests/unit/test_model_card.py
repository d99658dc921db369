"""The model card, and what is uploaded to the hub. A stand-in takes the place of the hub: nothing is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from test_model_merger import checkpoint, merge

from verl.checkpoint.model_card import render_model_card

pytestmark = pytest.mark.unit


class Hub:
    """`HfApi` with the signatures of huggingface_hub; records what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.error: Exception | None = None

    def create_repo(self, repo_id: str, *, private=None, repo_type=None, exist_ok=False) -> huggingface_hub.RepoUrl:
        assert exist_ok
        self.calls.append(("create_repo", (repo_id, private, repo_type)))
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self, *, repo_id: str, folder_path: Path, repo_type=None, commit_message=None) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(("upload_folder", (repo_id, sorted(path.name for path in Path(folder_path).iterdir()))))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    return hub


def make_step(folder: Path, **run: str) -> Path:
    shards = folder / "global_step_20" / "actor"
    shards.mkdir(parents=True)
    (shards.parent / "trainer.json").write_text(json.dumps({"step": 20, "run": run}))
    return shards


def read_metadata(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_card_names_base_model_step_and_command(tmp_path: Path) -> None:
    shards = make_step(tmp_path, command="train", model="Qwen/Qwen2.5-0.5B-Instruct")
    card = render_model_card(shards, is_adapter=False, is_value_model=False)
    assert read_metadata(card) == {
        "library_name": "transformers",
        "base_model": "Qwen/Qwen2.5-0.5B-Instruct",
        "pipeline_tag": "text-generation",
        "tags": ["verl", "reinforcement-learning"],
    }
    assert "step 20 of a run of reinforcement learning" in card
    adapter = render_model_card(shards, is_adapter=True, is_value_model=False)
    assert read_metadata(adapter)["library_name"] == "peft"
    assert 'from_pretrained("Qwen/Qwen2.5-0.5B-Instruct"), "THIS_REPOSITORY")' in adapter


def test_the_card_leaves_out_local_paths(tmp_path: Path) -> None:
    shards = make_step(tmp_path, command="sft", model=str(tmp_path / "secret-model"))
    card = render_model_card(shards, is_adapter=False, is_value_model=True)
    assert str(tmp_path) not in card
    assert "secret-model" not in card
    assert "base_model" not in card
    assert "supervised fine-tuning that started from a local model" in card
    assert "AutoModelForTokenClassification" in card


def test_a_verified_model_is_uploaded_with_its_card(tmp_path: Path, hub: Hub, capsys) -> None:
    source, _ = checkpoint(tmp_path / "run")
    assert merge(source, tmp_path / "merged", "--hf_upload_path", "me/mine", "--private") == 0
    (created, (name, files)) = hub.calls[0], hub.calls[1][1]
    assert created == ("create_repo", ("me/mine", True, "model"))
    assert name == "me/mine"
    assert {"README.md", "config.json", "model.safetensors"} <= set(files)
    assert "uploaded to https://huggingface.co/me/mine" in capsys.readouterr().out


def test_a_wrong_name_and_a_missing_login_are_reported_before_anything_is_merged(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    assert merge(tmp_path, tmp_path / "merged", "--hf_upload_path", "a/b/c") == 2
    assert "--hf_upload_path a/b/c: " in capsys.readouterr().err
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert merge(tmp_path, tmp_path / "merged", "--hf_upload_path", "me/mine") == 2
    assert "run `hf auth login`, or set HF_TOKEN" in capsys.readouterr().err
    assert merge(tmp_path, tmp_path / "merged", "--private") == 2
    assert "--private is for --hf_upload_path" in capsys.readouterr().err
    assert hub.calls == []


def test_a_failed_upload_leaves_the_model_and_says_where(tmp_path: Path, hub: Hub, capsys) -> None:
    source, _ = checkpoint(tmp_path / "run")
    hub.error = ConnectionError("no route to host")
    assert merge(source, tmp_path / "merged", "--hf_upload_path", "me/mine") == 2
    assert f"no route to host; the model is complete in {tmp_path}/merged" in capsys.readouterr().err
    assert (tmp_path / "merged" / "model.safetensors").is_file()
