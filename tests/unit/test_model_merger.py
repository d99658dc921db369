"""A checkpoint becomes a Hugging Face model that is equal to it, or nothing is written and the cause is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import chat_tokenizer, tiny_qwen2
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen2ForCausalLM

from verl.checkpoint import export
from verl.checkpoint.adapter import adapter_config
from verl.checkpoint.files import make_directory, write
from verl.checkpoint.locate import find_saved_model
from verl.checkpoint.manifest import CheckpointDir
from verl.checkpoint.save import save
from verl.checkpoint.shards import read_values
from verl.cli import main
from verl.errors import ConfigError
from verl.models.model_folder import WEIGHTS_INDEX
from verl.trainer.build.preflight import find_model_problems
from verl.training.fsdp.lora import fingerprint

pytestmark = pytest.mark.unit


def checkpoint(root: Path, *, tied: bool = False, head: bool = True, **changes: Any) -> tuple[Path, Qwen2ForCausalLM]:
    """Step 20 of a run of a bfloat16 model whose weights were kept in float32: the actor's folder, and the model."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=tied, vocab_size=127, dtype="bfloat16")).float()
    state = model.state_dict() | changes
    if not head:
        del state["lm_head.weight"]
    step = CheckpointDir(root).begin(20)
    files = {f"actor/{name}": each for name, each in save({"model": state}, step / "actor").items()}
    make_directory(step / "actor" / "huggingface")
    chat_tokenizer().save_pretrained(root / "tokenizer")
    small = {path.name: path.read_bytes() for path in (root / "tokenizer").iterdir()}
    model.config.dtype = torch.bfloat16
    small["config.json"] = model.config.to_json_string().encode()
    for name, data in small.items():
        files[f"actor/huggingface/{name}"] = write(step / "actor" / "huggingface" / name, data)
    CheckpointDir(root).commit(20, files)
    return step / "actor", model


def merge(source: Path, target: Path, *more: str) -> int:
    return main(["merge", "--backend", "fsdp", "--local_dir", str(source), "--target_dir", str(target), *more])


@pytest.mark.parametrize(("tied", "head"), [(False, True), (True, True), (True, False)])
def test_a_merged_model_is_the_checkpoints_in_the_type_of_the_original(tmp_path: Path, tied: bool, head: bool) -> None:
    source, model = checkpoint(tmp_path / "run", tied=tied, head=head)
    assert merge(source, tmp_path / "merged", *["--tie-word-embedding"] * tied) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.bfloat16
    tokens = torch.arange(9)[None]
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert torch.equal(merged(tokens).logits, model.eval()(tokens).logits)
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_large_model_is_several_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = checkpoint(tmp_path / "run")
    monkeypatch.setattr(export.export_weights, "__kwdefaults__", {"file_bytes": 50_000})
    assert merge(source, tmp_path / "merged") == 0
    index = json.loads((tmp_path / "merged" / WEIGHTS_INDEX).read_text())
    shards = sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == shards
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert len(shards) > 2
    assert main(["merge", "test", "--local_dir", str(source), "--test_hf_dir", str(tmp_path / "merged")]) == 0


def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = checkpoint(tmp_path / "run")
    shard = source / "shard-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-9] + b"damaged!!")
    assert merge(source, tmp_path / "merged") == 2
    assert "actor/shard-00001-of-00001.safetensors has changed" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_a_model_of_other_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, model = checkpoint(tmp_path / "run")
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    model.bfloat16().save_pretrained(tmp_path / "other")
    arguments = ["--backend", "fsdp", "--local_dir", str(source), "--test_hf_dir", str(tmp_path / "other")]
    assert main(["merge", "test", *arguments]) == 2
    assert "model.norm.weight has other values, by up to 1" in capsys.readouterr().err


def test_a_head_that_is_not_the_embedding_of_a_tied_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = checkpoint(tmp_path / "run", tied=True, **{"lm_head.weight": torch.zeros(127, 64)})
    assert merge(source, tmp_path / "merged") == 2
    assert "lm_head.weight differs from the embedding" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_a_critic_becomes_a_token_classifier_with_one_label(tmp_path: Path) -> None:
    source, model = checkpoint(tmp_path / "run")
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("lm_head")}
    state |= {"score.weight": torch.ones(1, 64), "score.bias": torch.zeros(1)}
    step = CheckpointDir(tmp_path / "run").begin(30)
    files = {f"critic/{name}": each for name, each in save({"model": state}, step / "critic").items()}
    CheckpointDir(tmp_path / "run").commit(30, files)
    named = ["--hf_model_path", str(source / "huggingface")]
    assert merge(step / "critic", tmp_path / "merged", "--is-value-model", *named) == 0
    critic, loading_info = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert critic.config.num_labels == 1
    assert not any(loading_info.values())


@pytest.mark.parametrize(
    ("source", "more", "said"),
    [
        ("run/global_steps_2/actor", [], "RUN has global_step_20"),
        ("run/tokenizer", [], "not the folder of a run or a checkpoint of the actor"),
        ("run/global_step_20", ["--is-value-model"], "not the folder of a run or a checkpoint of the critic"),
        ("run/global_step_2/actor", [], "RUN has global_step_20"),
        ("run/global_step_20/actor", ["--tie-word-embedding"], "remove the option"),
        ("run/global_step_20/actor", ["--frobnicate"], "--frobnicate (see `verl merge --help`)"),
    ],
)
def test_errors_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, more: list[str], said: str
) -> None:
    checkpoint(tmp_path / "run")
    assert merge(tmp_path / source, tmp_path / "merged", *more) == 2
    assert said.replace("RUN", str(tmp_path / "run")) in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_the_folder_of_a_run_means_its_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    checkpoint(run)
    (run / "global_step_30").mkdir()  # a save that did not finish
    assert main(["merge", str(run), "--target_dir", str(tmp_path / "merged")]) == 0
    assert f"merging {run}/global_step_20/actor, the newest checkpoint" in capsys.readouterr().out
    assert main(["merge", str(run / "global_step_20"), "--target_dir", str(tmp_path / "again")]) == 0
    assert (tmp_path / "merged" / "config.json").is_file()
    assert main(["merge"]) == 2
    assert "name the folder of a run" in capsys.readouterr().err


def test_generation_takes_the_model_of_a_checkpoint_or_says_how_to_make_it(tmp_path: Path) -> None:
    actor, _ = checkpoint(tmp_path / "run")
    for path in (tmp_path / "run", actor.parent, actor):
        with pytest.raises(ConfigError, match=f"run `verl merge {path} --target_dir merged` and set model=merged"):
            find_saved_model(str(path), "model")
    (actor / "huggingface" / "model.safetensors").touch()
    for path in (tmp_path / "run", actor.parent, actor):
        assert find_saved_model(str(path), "model") == str(actor / "huggingface")
    assert find_saved_model("org/name", "model") == "org/name"


def test_a_model_with_a_metadata_json_is_not_a_checkpoint(tmp_path: Path) -> None:
    for name in ("config.json", "metadata.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    assert find_saved_model(str(tmp_path), "model") == str(tmp_path)


def test_checkpoints_are_not_scored_or_trained_but_the_message_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "run")
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert f"--output responses.parquet model.path={tmp_path}/run" in capsys.readouterr().err
    [problem, *_] = find_model_problems({"model.path": str(tmp_path / "run")}, trust_remote_code=False)
    assert f"run `verl merge {tmp_path}/run --target_dir merged`" in problem


def test_both_spellings_of_a_step_folder_are_accepted(tmp_path: Path) -> None:
    checkpoint(tmp_path / "run")
    assert merge(tmp_path / "run/global_steps_20/actor", tmp_path / "merged") == 0
    assert (tmp_path / "merged" / "config.json").is_file()


def test_a_target_that_is_not_empty_is_not_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = checkpoint(tmp_path / "run")
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "mine.txt").write_text("mine")
    assert merge(source, tmp_path / "merged") == 2
    assert "already exists and is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "merged").iterdir()] == ["mine.txt"]


def adapted(root: Path) -> tuple[Path, Path, PeftModel]:
    """Step 20 of a run that trained an adapter: the actor's folder, the model below it, and both by PEFT alone."""
    torch.manual_seed(0)
    base = root / "base"
    Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True, vocab_size=127)).bfloat16().save_pretrained(base)
    chat_tokenizer().save_pretrained(base)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    tensors = {name: p.data for name, p in model.get_base_model().named_parameters() if ".lora_" in name}
    for tensor in tensors.values():
        tensor.copy_(0.2 * torch.randn_like(tensor))
    says = adapter_config(base=str(base), rank=4, alpha=8, targets=["q_proj", "up_proj"])
    state = {"model": tensors, "base": {"fingerprint": fingerprint(str(base)), "adapter": json.dumps(says)}}
    step = CheckpointDir(root / "run").begin(20)
    files = {f"actor/{name}": each for name, each in save(state, step / "actor").items()}
    make_directory(step / "actor" / "huggingface")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        written = write(step / "actor" / "huggingface" / name, (base / name).read_bytes())
        files[f"actor/huggingface/{name}"] = written
    CheckpointDir(root / "run").commit(20, files)
    return step / "actor", base, model


def test_an_adapter_is_merged_into_its_model(tmp_path: Path) -> None:
    source, _, model = adapted(tmp_path)
    assert merge(source, tmp_path / "merged") == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert found.dtype == torch.bfloat16
    right = dict(model.merge_and_unload().named_parameters())
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, right[name].bfloat16()), name
    assert main(["merge", "test", "--local_dir", str(source), "--test_hf_dir", str(tmp_path / "merged")]) == 0


def test_an_adapter_is_written_as_peft_loads_it(tmp_path: Path) -> None:
    source, base, model = adapted(tmp_path)
    assert merge(source, tmp_path / "adapter", "--adapter") == 0
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    fresh = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    found = PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    tokens = torch.arange(9)[None]
    assert torch.equal(found(tokens).logits, model(tokens).logits)
    test = ["merge", "test", "--local_dir", str(source), "--test_hf_dir", str(tmp_path / "adapter"), "--adapter"]
    assert main(test) == 0


def test_an_adapter_is_not_merged_into_other_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, base, _ = adapted(tmp_path)
    torch.manual_seed(1)
    Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True, vocab_size=127)).bfloat16().save_pretrained(base)
    for more in ([], ["--adapter"]):
        assert merge(source, tmp_path / "merged", *more) == 2
        assert "does not have the weights that the adapter was trained on" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_a_checkpoint_without_an_adapter_has_none_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = checkpoint(tmp_path / "run")
    assert merge(source, tmp_path / "adapter", "--adapter") == 2
    assert "has full weights and no adapter" in capsys.readouterr().err


def test_a_critics_adapter_is_merged_with_the_head_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, base, model = adapted(tmp_path)
    tensors = {name: p.data for name, p in model.get_base_model().named_parameters() if ".lora_" in name}
    head = {"score.weight": torch.randn(1, 64), "score.bias": torch.randn(1)}
    says = {key: read_values(source, "base.")[key] for key in ("fingerprint", "adapter")}
    step = CheckpointDir(tmp_path / "run").begin(30)
    files = {f"critic/{n}": each for n, each in save({"model": tensors | head, "base": says}, step / "critic").items()}
    CheckpointDir(tmp_path / "run").commit(30, files)
    named = ["--hf_model_path", str(base)]
    assert merge(step / "critic", tmp_path / "merged", "--is-value-model", *named) == 0
    critic, loading_info = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not any(loading_info.values())
    assert torch.equal(critic.score.weight.float(), head["score.weight"].bfloat16().float())
    right = dict(model.merge_and_unload().named_parameters())
    for name, parameter in critic.model.named_parameters():
        assert torch.equal(parameter.float(), right[f"model.{name}"].bfloat16().float()), name
    assert merge(step / "critic", tmp_path / "adapter", "--is-value-model", "--adapter") == 2
    assert "--adapter is not supported for critics" in capsys.readouterr().err
