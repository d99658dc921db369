"""Settings of the FSDP2 engine. Imports no torch, because the controller creates them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from verl.training.settings import EngineSettings, read_common


@dataclass(frozen=True, slots=True)
class FsdpSettings(EngineSettings):
    """Settings of an `FsdpEngine`."""

    engine: ClassVar[str] = "fsdp2"

    fsdp_size: int = -1  # ranks that share one copy of the weights, replicated over the others; -1: all
    reshard_after_forward: bool = True  # free gathered layers before the backward pass
    offload_policy: bool = False  # FSDP2's offload: shards, gradients and optimizer state always in host memory
    compile_layers: bool = False  # fuse the elementwise work of each decoder layer

    @classmethod
    def from_section(cls, section: Any, model_path: str, device: str) -> Self:
        common, offload_policy = read_common(section, device), device != "cpu" and section.offload_policy
        if offload_policy:
            common |= {"param_offload": False, "optimizer_offload": False}
        return cls(
            model_path,
            fsdp_size=section.fsdp_size,
            reshard_after_forward=section.reshard_after_forward,
            offload_policy=offload_policy,
            compile_layers=device != "cpu" and section.use_torch_compile,
            **common,
        )

    def freeze(self, *, param_offload: bool) -> Self:
        """Return the same settings for a model that is never updated; its shards stay on the device."""
        frozen = EngineSettings.freeze(self, param_offload=param_offload)
        return replace(frozen, offload_policy=False)
