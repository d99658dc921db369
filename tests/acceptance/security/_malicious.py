"""Artefacts that try to create a file when they are read, each with the way a user would come to read it.

A maker gets an empty folder and the path of its canary, lays the artefact down, and returns what opens it.
"""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tiny import chat_tokenizer, load_packed, tiny_qwen2
from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification

from verl.checkpoint.files import compute_checksum, make_directory, write
from verl.checkpoint.manifest import CheckpointDir, _seal, find_corruption
from verl.checkpoint.save import load, save
from verl.cli import main as verl
from verl.data.dataset import PromptDataset, PromptOptions
from verl.rewards.models.hf import HfRewardModel
from verl.rewards.settings import RewardModelSettings
from verl.rollout.hf import HfEngine
from verl.rollout.settings import RolloutEngineSettings

Opening = Callable[[], Any]
Maker = Callable[[Path, Path], Opening]
ARTEFACTS: dict[str, Maker] = {}
EVIL_CODE = "open({canary!r}, 'w')\n"


class Touch:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return io.open, (str(self.path), "w")


class CommandFailedError(Exception):
    """A command printed what is wrong and failed."""


def artefact(name: str) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        ARTEFACTS[name] = maker
        return maker

    return register


def running(*arguments: str) -> Opening:
    """A command; a refusal is an error here."""

    def run() -> None:
        if verl(list(arguments)) != 0:
            raise CommandFailedError

    return run


# --- models


def model(folder: Path, *, rewards: bool = False, **changes: Any) -> Path:
    """A whole model with its tokenizer; `changes` go into its config.json."""
    torch.manual_seed(0)
    config = tiny_qwen2(vocab_size=131, num_labels=1, pad_token_id=0)
    made: Any = Qwen2ForSequenceClassification(config) if rewards else Qwen2ForCausalLM(config)
    made.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    change(folder / "config.json", **changes)
    return folder


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def loading(folder: Path) -> Opening:
    return lambda: load_packed(str(folder), dtype=torch.float32)


def training(folder: Path) -> Opening:
    data = rows(folder.parent / "rows.parquet")
    sizes = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.n_gpus_per_node=1"]
    return running("train", f"actor_rollout_ref.model.path={folder}", f"data.train_files={data}", *sizes)


def rows(path: Path) -> Path:
    prompt = [{"role": "user", "content": "2+2="}]
    row = {"prompt": prompt, "data_source": "math", "reward_model": {"ground_truth": "4"}}
    pq.write_table(pa.Table.from_pylist([row] * 4), path)
    return path


@artefact("weights: a pickle called pytorch_model.bin")
def _(folder: Path, canary: Path) -> Opening:
    path = model(folder / "m")
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(canary)))
    return loading(path)


@artefact("weights: torch.save of an object, as pytorch_model.bin")
def _(folder: Path, canary: Path) -> Opening:
    path = model(folder / "m")
    (path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Touch(canary)}, path / "pytorch_model.bin")
    return loading(path)


@artefact("weights: a shard of an index of .bin files")
def _(folder: Path, canary: Path) -> Opening:
    path = model(folder / "m")
    (path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Touch(canary)}, path / "pytorch_model-1.bin")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model-1.bin"}}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return loading(path)


def indexed(folder: Path, canary: Path, index: str, shard: str) -> Path:
    """A model whose index names a pickle elsewhere."""
    path = model(folder / "m")
    (path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Touch(canary)}, folder / "outside.bin")
    (path / index).write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": shard}}))
    return path


@artefact("shards: safetensors index with ../")
def _(folder: Path, canary: Path) -> Opening:
    return training(indexed(folder, canary, "model.safetensors.index.json", "../outside.bin"))


@artefact("shards: .bin index with ../")
def _(folder: Path, canary: Path) -> Opening:
    return training(indexed(folder, canary, "pytorch_model.bin.index.json", "../outside.bin"))


@artefact("shards: an absolute path in an index")
def _(folder: Path, canary: Path) -> Opening:
    return loading(indexed(folder, canary, "model.safetensors.index.json", str(folder / "outside.bin")))


@artefact("weights: a pickle called model.safetensors")
def _(folder: Path, canary: Path) -> Opening:
    path = model(folder / "m")
    (path / "model.safetensors").write_bytes(pickle.dumps(Touch(canary)))
    return loading(path)


def with_code(folder: Path, canary: Path, **changes: Any) -> Path:
    path = model(folder / "m", **changes)
    for name in ("evil.py", "modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py"):
        (path / name).write_text(EVIL_CODE.format(canary=str(canary)))
    return path


AUTO_MAP = {
    "AutoConfig": "configuration_evil.EvilConfig",
    "AutoModel": "modeling_evil.Evil",
    "AutoModelForCausalLM": "modeling_evil.Evil",
    "AutoModelForSequenceClassification": "modeling_evil.Evil",
}


@artefact("auto_map: a model type of its own")
def _(folder: Path, canary: Path) -> Opening:
    return loading(with_code(folder, canary, auto_map=AUTO_MAP, model_type="evil"))


@artefact("auto_map: with a known model type")
def _(folder: Path, canary: Path) -> Opening:
    return loading(with_code(folder, canary, auto_map=AUTO_MAP))


@artefact("auto_map: in a rollout engine")
def _(folder: Path, canary: Path) -> Opening:
    path = with_code(folder, canary, auto_map=AUTO_MAP, model_type="evil")
    return lambda: asyncio.run(HfEngine(RolloutEngineSettings(str(path))).start())


@artefact("auto_map: of the tokenizer")
def _(folder: Path, canary: Path) -> Opening:
    path = with_code(folder, canary)
    auto_map = {"AutoTokenizer": ["tokenization_evil.Evil", None]}
    change(path / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="Evil")
    return running("data", str(rows(folder / "r.parquet")), f"actor_rollout_ref.model.path={path}")


@artefact("config: an attention kernel from elsewhere")
def _(folder: Path, canary: Path) -> Opening:
    return training(with_code(folder, canary, attn_implementation="evil/kernel"))


@artefact("config: custom_generate in a model folder")
def _(folder: Path, canary: Path) -> Opening:
    path = with_code(folder, canary)
    (path / "custom_generate").mkdir()
    (path / "custom_generate" / "generate.py").write_text(EVIL_CODE.format(canary=str(canary)))
    return loading(path)


@artefact("chat template: out of Jinja's sandbox")
def _(folder: Path, canary: Path) -> Opening:
    path = model(folder / "m")
    escape = f"{{{{ cycler.__init__.__globals__.__builtins__.open({str(canary)!r}, 'w') }}}}"
    (path / "chat_template.jinja").write_text(escape)
    return running("data", str(rows(folder / "r.parquet")), f"actor_rollout_ref.model.path={path}")


@artefact("reward model: a pickle as its weights")
def _(folder: Path, canary: Path) -> Opening:
    path = model(folder / "m", rewards=True)
    (path / "model.safetensors").unlink()
    torch.save({"score.weight": Touch(canary)}, path / "pytorch_model.bin")
    return lambda: asyncio.run(HfRewardModel(RewardModelSettings("", str(path), batch=1, deadline_s=60)).start())


@artefact("reward model: auto_map")
def _(folder: Path, canary: Path) -> Opening:
    path = model(folder / "m", rewards=True, auto_map=AUTO_MAP, model_type="evil")
    for name in ("modeling_evil.py", "configuration_evil.py"):
        (path / name).write_text(EVIL_CODE.format(canary=str(canary)))
    return lambda: asyncio.run(HfRewardModel(RewardModelSettings("", str(path), batch=1, deadline_s=60)).start())


# --- data and settings


@artefact("data: a pickle called train.parquet")
def _(folder: Path, canary: Path) -> Opening:
    path = folder / "train.parquet"
    path.write_bytes(pickle.dumps(Touch(canary)))
    return running("data", str(path))


@artefact("data: Parquet with a pickled Arrow type")
def _(folder: Path, canary: Path) -> Opening:
    metadata = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": b""}
    metadata[b"ARROW:extension:metadata"] = pickle.dumps(Touch(canary))
    table = pq.read_table(rows(folder / "plain.parquet"))
    field = pa.field("extra", pa.int64(), metadata=metadata)
    table = table.append_column(field, pa.array([1] * len(table)))
    pq.write_table(table, folder / "train.parquet")
    return running("data", str(folder / "train.parquet"))


@artefact("data: a pickle in the cache of lengths")
def _(folder: Path, canary: Path) -> Opening:
    path = rows(folder / "train.parquet")
    cache = folder / "cache"

    def read() -> None:
        from verl.data import lengths

        lengths.ROWS_TO_KEEP, lengths.SETTLED_S = 1, -1e9
        options = PromptOptions(max_prompt_length=64)
        PromptDataset([str(path)], chat_tokenizer(), options, cache_dir=cache)
        kept = list(cache.rglob("*.npy"))
        assert kept, "the cache is used"
        for file in kept:
            np.save(file, np.array([Touch(canary)], dtype=object), allow_pickle=True)
        PromptDataset([str(path)], chat_tokenizer(), options, cache_dir=cache)

    return read


def settings(folder: Path, text: str) -> Opening:
    (folder / "evil.yaml").write_text(text)
    return running("config", "--config-path", str(folder), "--config-name", "evil")


@artefact("settings: a Python object in YAML")
def _(folder: Path, canary: Path) -> Opening:
    return settings(folder, f"trainer:\n  project_name: !!python/object/apply:io.open [{canary}, w]\n")


@artefact("settings: _target_ in YAML")
def _(folder: Path, canary: Path) -> Opening:
    text = f"reward:\n  custom_reward_function:\n    reward_kwargs: {{_target_: io.open, _args_: [{canary}, w]}}\n"
    return settings(folder, text)


# --- checkpoints


def checkpoint(folder: Path) -> Path:
    """A whole checkpoint of a tiny model: the directory of its step."""
    torch.manual_seed(0)
    made = Qwen2ForCausalLM(tiny_qwen2(vocab_size=131))
    run = CheckpointDir(folder / "run")
    step = run.begin(20)
    state = {"model": made.state_dict(), "schedule": {"step": 20}}
    files = {f"actor/{name}": each for name, each in save(state, step / "actor").items()}
    make_directory(step / "actor" / "huggingface")
    model(folder / "model")
    for path in (folder / "model").iterdir():
        if path.suffix != ".safetensors":
            name = f"actor/huggingface/{path.name}"
            files[name] = write(step / name, path.read_bytes())
    run.commit(20, files)
    return step


def sealed(step: Path, *more: str) -> None:
    """Make the manifest match the files, as an attacker would; `more` are additional names in it."""
    path = step / "ckpt_contents.json"
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        checksum = compute_checksum(step / name)
        manifest["files"][name] = {"size": checksum.size, "sha256": checksum.sha256}
    manifest["files"] |= {name: {"size": 1, "sha256": "0"} for name in more}
    contents = {"step": manifest["step"], "files": manifest["files"]}
    path.write_text(json.dumps({**contents, "seal": _seal(contents)}))


def resuming(step: Path) -> Opening:
    """What a run does with the newest checkpoint."""

    def resume() -> None:
        run = CheckpointDir(step.parent)
        latest = run.latest()
        assert latest is not None, "nothing to resume from"
        if damage := find_corruption(run.step_dir(latest)):
            raise RuntimeError(str(damage))
        run.read_trainer_state(latest)
        state = {"model": Qwen2ForCausalLM(tiny_qwen2(vocab_size=131)).state_dict(), "schedule": {"step": 0}}
        load(state, run.step_dir(latest) / "actor")

    return resume


def merging(step: Path) -> Opening:
    return running("merge", "--local_dir", str(step / "actor"), "--target_dir", str(step.parent / "merged"))


def poisoned(step: Path, canary: Path) -> Path:
    """A shard of pickles in the place of tensors and values, of the size that the metadata say."""
    shard = step / "actor" / "shard-00001-of-00001.safetensors"
    stream = io.BytesIO()
    torch.save(Touch(canary), stream)
    size = shard.stat().st_size
    shard.write_bytes((stream.getvalue() * (size // len(stream.getvalue()) + 1))[:size])
    sealed(step)
    return step


@artefact("checkpoint: pickles in a shard, resumed")
def _(folder: Path, canary: Path) -> Opening:
    return resuming(poisoned(checkpoint(folder), canary))


@artefact("checkpoint: pickles in a shard, merged")
def _(folder: Path, canary: Path) -> Opening:
    return merging(poisoned(checkpoint(folder), canary))


@artefact("checkpoint: metadata that are a pickle")
def _(folder: Path, canary: Path) -> Opening:
    step = checkpoint(folder)
    for name in ("metadata.json", ".metadata"):
        (step / "actor" / name).write_bytes(pickle.dumps(Touch(canary)))
    sealed(step)
    return resuming(step)


@artefact("checkpoint: metadata that name a file elsewhere")
def _(folder: Path, canary: Path) -> Opening:
    step = checkpoint(folder)
    torch.save(Touch(canary), folder / "outside.pt")
    path = step / "actor" / "metadata.json"
    path.write_text(path.read_text().replace("shard-00001-of-00001.safetensors", "../../../outside.pt"))
    sealed(step)
    return merging(step)


@artefact("checkpoint: a manifest that names a file elsewhere")
def _(folder: Path, canary: Path) -> Opening:
    step = checkpoint(folder)
    torch.save(Touch(canary), folder / "outside.pt")
    sealed(step, "../../outside.pt")
    return resuming(step)


@artefact("checkpoint: trainer.json is a pickle")
def _(folder: Path, canary: Path) -> Opening:
    step = checkpoint(folder)
    (step / "trainer.json").write_bytes(pickle.dumps(Touch(canary)))
    sealed(step)
    return resuming(step)


@artefact("checkpoint: pickles under names that others load")
def _(folder: Path, canary: Path) -> Opening:
    step = checkpoint(folder)
    for name in ("data.pt", "actor/model_world_size_1_rank_0.pt", "actor/extra_state_world_size_1_rank_0.pt"):
        (step / name).write_bytes(pickle.dumps(Touch(canary)))
    return resuming(step)


@artefact("checkpoint: auto_map in its config, merged")
def _(folder: Path, canary: Path) -> Opening:
    step = checkpoint(folder)
    change(step / "actor" / "huggingface" / "config.json", auto_map=AUTO_MAP, model_type="evil")
    for name in ("modeling_evil.py", "configuration_evil.py"):
        (step / "actor" / "huggingface" / name).write_text(EVIL_CODE.format(canary=str(canary)))
    sealed(step)
    return merging(step)


@artefact("checkpoint: foreign weights next to its config, merged")
def _(folder: Path, canary: Path) -> Opening:
    step = checkpoint(folder)
    torch.save({"lm_head.weight": Touch(canary)}, step / "actor" / "huggingface" / "pytorch_model.bin")
    return merging(step)


def control(folder: Path) -> bool:
    """That a canary sings: the same pickle, unpickled as others do, does create its file."""
    canary = folder / "control"
    pickle.loads(pickle.dumps(Touch(canary)))
    stream = io.BytesIO()
    torch.save(Touch(folder / "control.pt"), stream)
    stream.seek(0)
    torch.load(stream, weights_only=False)
    return canary.exists() and (folder / "control.pt").exists()


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
