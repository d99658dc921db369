"""LoRA through PEFT: a model that keeps its weights and learns a small adapter, and that model with the adapter off."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl.checkpoint.adapter import NAME, adapter_config, is_adapter
from verl.data.flat_batch import FlatBatch
from verl.errors import CheckpointError, EngineError
from verl.model_safety import local_path
from verl.training.settings import LoraSettings

if TYPE_CHECKING:
    from verl.training.engine import ModelOutput
    from verl.training.fsdp import FsdpEngine
    from verl.training.logprobs import LastLayer
    from verl.training.model import PackedModel

__all__ = [
    "BaseModelReference",
    "add_adapter",
    "check_base",
    "describe_adapter",
    "disable_adapter",
    "fingerprint",
    "is_trainable",
]

ALL = "all-linear"
HEAD = "score."
"""Where the value head of a critic lies: it is new, and is trained whole beside an adapter."""
EDGE_BYTES = 4096


def add_adapter(model: PackedModel, settings: LoraSettings, path: str) -> None:
    """Put an adapter on the linear modules that the settings name; the same numbers on every rank.

    What it adds is zero at first: the model computes what it did before.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise EngineError(
            f'peft.lora_rank={settings.rank}: adapters need PEFT ({error}); pip install "verl[lora]", or set '
            "peft.lora_rank=0 to train all weights"
        ) from error
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=_targets(model, settings, path),
        lora_dropout=0.0,
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        inject_adapter_in_model(config, model.backbone, NAME)
    for name, parameter in model.hf.named_parameters():
        parameter.requires_grad_(is_trainable(name))
        if is_adapter(name):  # small, and updates of it smaller: in float32 whatever the weights are kept in
            parameter.data = parameter.data.float()


def is_trainable(name: str) -> bool:
    """Whether a parameter of a model with an adapter is trained: the adapter's own, and a critic's head."""
    return is_adapter(name) or name.startswith(HEAD)


def _targets(model: PackedModel, settings: LoraSettings, path: str) -> list[str]:
    """The modules that get an adapter: linear ones inside the layers, of the names that were asked for."""
    inside = {id(module) for layer in model.layers() for module in layer.modules()}
    modules = model.backbone.named_modules()
    linear = [name for name, module in modules if isinstance(module, nn.Linear) and id(module) in inside]
    wanted = settings.targets
    if wanted == ALL:
        found, missed = linear, list[str]()
    elif isinstance(wanted, str):
        found, missed = [name for name in linear if re.fullmatch(wanted, name)], []
    else:
        found = [name for name in linear if any(_ends(name, ending) for ending in wanted)]
        missed = [ending for ending in wanted if not any(_ends(name, ending) for name in linear)]
    if missed or not found:
        there = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear)) or "none"
        raise EngineError(
            f"peft.target_modules: {', '.join(missed) or wanted} names no linear module in the layers of {path}; there "
            f"are {there}; set peft.target_modules={ALL}, or some of them as a list"
        )
    return found


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def describe_adapter(model: PackedModel, settings: LoraSettings, path: str) -> dict[str, str]:
    """What a checkpoint says beside the tensors of an adapter: what they are, and which weights they belong to."""
    adapted = {name.partition(".lora_A.")[0] for name, _ in model.hf.named_parameters() if ".lora_A." in name}
    endings = {name.rpartition(".")[2] for name in adapted}
    alike = {name for name, _ in model.hf.named_modules() if name.rpartition(".")[2] in endings}
    targets = endings if adapted == alike else adapted
    config = adapter_config(base=path, rank=settings.rank, alpha=settings.alpha, targets=targets)
    return {"fingerprint": fingerprint(path), "adapter": json.dumps(config)}


def check_base(mine: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """An adapter on weights that it was not trained on is noise: refused, as is one of another size, scale or place."""
    config, other = json.loads(mine["adapter"]), json.loads(saved["adapter"])
    if mine["fingerprint"] != saved["fingerprint"]:
        raise CheckpointError(
            f"the adapter in the checkpoint belongs to other weights (those of {other['base_model_name_or_path']} when "
            f"it was saved) than {config['base_model_name_or_path']} has; set the model's path to the former, or begin "
            "anew with trainer.resume_mode=disable"
        )
    for setting, key in {"lora_rank": "r", "lora_alpha": "lora_alpha", "target_modules": "target_modules"}.items():
        if config[key] != other[key]:
            saved_one = str(other[key]).replace(" ", "").replace("'", "")
            raise CheckpointError(
                f"peft.{setting}: {config[key]}, and the adapter in the checkpoint was trained with {other[key]}; set "
                f"peft.{setting}={saved_one}, or begin anew with trainer.resume_mode=disable"
            )


def fingerprint(path: str) -> str:
    """Tells one model's weights from another's: names, types, shapes, and the edges of every tensor, not all bytes."""
    folder = Path(local_path(path)).expanduser()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(
            f"model {path}: has no weights in safetensors, by which an adapter could know its model again"
        )
    digest = hashlib.sha256()
    for name, kind, shape, edges in sorted(edge for file in files for edge in _edges(file)):
        digest.update(f"{name} {kind} {shape}\n".encode() + edges)
    return digest.hexdigest()


def _edges(path: Path) -> Iterator[tuple[str, str, str, bytes]]:
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, end = entry["data_offsets"]
            parts = []
            for place in (first, max(first, end - EDGE_BYTES)):
                file.seek(start + place)
                parts.append(file.read(min(EDGE_BYTES, end - place)))
            yield name, entry["dtype"], str(entry["shape"]), b"".join(parts)


@contextmanager
def disable_adapter(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as if it had no adapter, by the very operations of a model without one.

    PEFT's own switch (`enable_adapters`) also takes `requires_grad` from the parameters, which FSDP has read already.
    """
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class BaseModelReference:
    """The model that an adapter started from, as a reference: no second copy of the weights, and never updated."""

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine
        self.rank, self.world_size = engine.rank, engine.world_size

    def forward(
        self, micro_batches: Sequence[FlatBatch], *, temperature: float | None = None, reference: Any = None
    ) -> list[ModelOutput]:
        """What the model without its adapter says."""
        with disable_adapter(self._engine.model):
            return self._engine.forward(micro_batches, temperature=temperature, reference=reference)

    def last_layer(self, batch: FlatBatch) -> LastLayer:
        """What the adapted model's distributions are compared with, also in the midst of its update."""
        training = self._engine.model.training
        with disable_adapter(self._engine.model):
            layer = self._engine.last_layer(batch)
        self._engine.model.train(training)
        return layer

    def reshard(self) -> None:
        self._engine.reshard()

    def gather(self, rows: Tensor) -> Tensor:
        return self._engine.gather(rows)

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing: its weights are those of the model's path."""
