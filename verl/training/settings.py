"""Settings of training engines. Imports no torch, because the controller creates them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from verl.config.features import resolve_dtype
from verl.training.layout import RankLayout

Head = Literal["tokens", "value"]
"""What a model predicts: the next token (a policy), or the value of a state (a critic)."""

Optimizer = Literal["adamw", "adamw_8bit", "muon"]

CHUNK_ELEMENTS = 1 << 24
"""Number of logits per chunk on the CPU: 64 MiB in float32."""
CHUNK_POSITIONS = 4096
"""Number of positions per chunk on accelerators, for which 110 (the above at 152k tokens) are too few."""


def default_chunk(device: str, vocabulary: int) -> int:
    """Return the number of positions whose logits are computed at a time, on this type of device.

    >>> default_chunk("cpu", 151_936), default_chunk("cuda", 151_936)
    (110, 4096)
    """
    return max(1, CHUNK_ELEMENTS // vocabulary) if device == "cpu" else CHUNK_POSITIONS


ALL_LINEAR = "all-linear"


def is_target(name: str, targets: str | Collection[str]) -> bool:
    """Return whether a linear module gets an adapter, by its name in the model without its head."""
    if isinstance(targets, str):
        return targets == ALL_LINEAR or re.fullmatch(targets, name) is not None
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in targets)


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """A LoRA adapter. `targets`: "all-linear", a regular expression for full module names, or suffixes of them."""

    rank: int
    alpha: int = 16
    targets: str | tuple[str, ...] = ALL_LINEAR
    seed: int = 0  # for the initial values, which are the same on every rank
    path: str | None = None  # directory of a PEFT adapter to start from, instead of random values

    @property
    def scale(self) -> float:
        """The factor of the product of the two matrices."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class Schedule:
    """`lr` after a linear warmup of `warmup_steps`, then constant or decaying to `min_ratio * lr` at `total_steps`.

    The warmup starts from `init_ratio * lr`, which the step before the first one would have.

    A pure function of the step, so that a checkpoint holds one number.
    """

    lr: float
    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_ratio: float = 0.0
    init_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule: {self.kind!r} is not one of constant, linear, cosine")
        if self.kind != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(
                f"schedule={self.kind}: total_steps {self.total_steps} must be more than warmup_steps "
                f"{self.warmup_steps}; set the total number of steps, or use schedule=constant"
            )

    def at(self, step: int) -> float:
        """Return the learning rate of training step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (self.init_ratio + (1.0 - self.init_ratio) * (step + 1) / self.warmup_steps)
        if self.kind == "constant":
            return self.lr
        assert self.total_steps is not None
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        left = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.lr * (self.min_ratio + (1.0 - self.min_ratio) * left)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of a model that every training engine understands, as far as its capabilities go.

    An engine has a subclass, which adds its own. A model that is not `trainable` (a reference) has no optimizer.
    """

    engine: ClassVar[str]
    """The name under which the engine is registered."""

    model_path: str
    head: Head = "tokens"
    role: str = "actor"  # prefix of the metrics: actor/grad_norm, critic/lr
    trainable: bool = True
    lora: LoraSettings | None = None  # train this adapter, and a critic's head, instead of all weights
    optimizer: Optimizer = "adamw"
    schedule: Schedule = Schedule(1e-6)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    muon_momentum: float = 0.95
    muon_adjust_lr: str = "match_rms_adamw"
    stochastic_rounding: bool = False  # round updates of bfloat16 parameters at random
    grad_clip: float | None = 1.0
    max_skipped_steps: int = 20  # updates in a row whose gradient is not finite
    param_dtype: str = "float32"  # dtype of stored parameters and optimizer state
    compute_dtype: str = "float32"  # dtype of the layers; gradients are reduced over ranks in float32
    gradient_checkpointing: bool = False
    expert_parallel_size: int = 1  # ranks over which the experts of an MoE model are distributed
    sequence_parallel_size: int = 1  # ranks that split every sequence between them, and get the same batches
    param_offload: bool = False  # keep weights in host memory while the engine is idle
    optimizer_offload: bool = False  # keep optimizer state there except in optimizer steps
    compile: bool = False  # compile the kernels of log-probs and entropies
    temperature: float = 1.0  # sampling temperature of the trained distribution
    logprob_chunk: int | None = None  # positions per chunk of logits
    shared_prompts: bool = False  # compute a prompt once for all sequences of a micro-batch that begin with it
    fp32_lm_head: bool = False  # compute logits in float32, whatever the layers compute in
    router_replay: bool = False  # use the experts given with a batch; forward passes return those used
    router_aux_loss_coef: float = 0.0  # weight of the load-balancing loss, for the experts given with a batch
    device: str = "cpu"
    trust_remote_code: bool = False

    @classmethod
    def from_section(cls, section: Any, model_path: str, device: str) -> Self:
        """Return the data types and the sharding of a model, from the section of the configuration that the spec names.

        A subclass that has settings of its own reads them too.
        """
        return cls(model_path, **read_common(section, device))

    def freeze(self, *, param_offload: bool) -> Self:
        """Return the same settings for a model that is never updated."""
        return replace(self, trainable=False, param_offload=param_offload, optimizer_offload=False)

    def layout(self, world_size: int) -> RankLayout:
        """Return which ranks get the same samples."""
        return RankLayout.of_adjacent(world_size, self.sequence_parallel_size)


def read_common(section: Any, device: str) -> dict[str, Any]:
    """Return the settings of a section that all engines have. Offloading is only for devices other than the CPU."""
    can_offload = device != "cpu"
    return {
        "device": device,
        "param_dtype": section.model_dtype,
        "compute_dtype": resolve_dtype(section.dtype, device),
        "stochastic_rounding": section.stochastic_rounding,
        "expert_parallel_size": section.expert_parallel_size,
        "param_offload": can_offload and section.param_offload,
        "optimizer_offload": can_offload and section.optimizer_offload,
    }


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """What the train workers record of a step, and where they write it."""

    directory: str
    tools: tuple[str, ...]
    ranks: frozenset[int]
