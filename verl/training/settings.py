"""What a training engine is told. Imports no torch: the controller makes these records, and holds no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FsdpSettings", "Head", "LoraSettings"]

Head = Literal["tokens", "value"]
"""What a model says of a state: which token comes next (a policy), or what it is worth (a critic)."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """An adapter. `targets`: "all-linear", a pattern that names match whole, or endings of the names of modules."""

    rank: int
    alpha: int = 16
    targets: str | tuple[str, ...] = "all-linear"
    seed: int = 0  # of its first numbers, the same on every rank

    @property
    def scale(self) -> float:
        """By what the product of its two factors is multiplied."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class FsdpSettings:
    """All that an `FsdpEngine` is told. A model that is not `trainable` has no optimiser: a reference."""

    model_path: str
    head: Head = "tokens"
    role: str = "actor"  # before the engine's own metrics: actor/grad_norm, critic/lr
    trainable: bool = True
    lora: LoraSettings | None = None  # train this adapter, and a critic's head, instead of all weights
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    grad_clip: float | None = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr_ratio: float = 0.0
    param_dtype: str = "float32"  # in which parameters and optimiser states are kept
    compute_dtype: str = "float32"  # in which layers compute; gradients are summed over ranks in float32
    gradient_checkpointing: bool = False
    reshard_after_forward: bool = True  # gathered layers are let go of before the backward pass
    param_offload: bool = False  # weights lie in host memory while the engine is not used
    optimizer_offload: bool = False  # moments lie there but for the optimiser's step
    offload_policy: bool = False  # FSDP2's own: shards, gradients and moments always lie there
    compile: bool = False  # the kernels of log-probs and entropies
    temperature: float = 1.0  # of the distribution whose log-probs are trained
    logprob_chunk: int | None = None  # positions whose logits exist at once
    device: str = "cpu"
    trust_remote_code: bool = False
