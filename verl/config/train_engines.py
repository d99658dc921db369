"""Training engines by name: what each of them supports, and where its code is. No engine is imported here.

A module of the user, named in `actor_rollout_ref.model.external_lib`, registers its own:

>>> register_train_engine(
...     TrainEngineSpec("mine", "my_engine.engine:MyEngine", "my_engine.settings:MySettings", capabilities=frozenset())
... )
"""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal, get_args

DEFAULT_ENGINE = "fsdp2"

Capability = Literal[
    "adapters",  # LoRA: trains an adapter, and compares with the model below it
    "value_head",  # critics
    "exact_kl",  # the KL to another engine over the whole vocabulary, in the output and in the loss
    "squared_probs",  # sums of squared probabilities
    "many_ranks",  # more than one train rank
    "sequence_parallel",  # ranks that share the tokens of a sequence (Ulysses)
    "expert_parallel",  # experts of an MoE model distributed over ranks
    "replicas",  # several copies of the model, each sharded over some of the ranks (HSDP)
    "routing",  # replay and load balancing of the routers of an MoE model
    "sampling_mask",  # log-probs, entropies and KLs over the `kept_ids` of a batch
    "shared_prompts",  # prompts computed once for their responses
    "offload",  # weights, or optimizer state, in host memory while they are not used
    "bfloat16_weights",  # master weights in bfloat16; float32 is always supported
    "stochastic_rounding",  # of bfloat16 weights
    "bfloat16",  # computation in bfloat16; float32 is always supported
    "float16",  # computation in float16
    "adamw_8bit",
    "muon",
]
CAPABILITIES: frozenset[Capability] = frozenset(get_args(Capability))


@dataclass(frozen=True, slots=True)
class TrainEngineSpec:
    """A training engine. Its code is named as `package.module:name` and imported when it is used.

    Attributes:
        name: The value of `actor_rollout_ref.actor.strategy`.
        engine: The class of the `TrainEngine`, called with its settings.
        settings: The class of its settings, a subclass of `EngineSettings`.
        capabilities: What it supports besides training a policy in float32 with AdamW on one rank.
        section: The section of a model's settings that has the engine's own: data types, sharding, offloading.
        group_sizes: The settings of a model whose product is the number of ranks that get the same samples.
        sequence_size: The one of them whose ranks share the tokens of a sequence; None: no ranks do.
        needs_accelerators: Whether it cannot train on CPUs.
    """

    name: str
    engine: str
    settings: str
    capabilities: frozenset[Capability] = frozenset()
    section: str = "fsdp_config"
    group_sizes: tuple[str, ...] = ()
    sequence_size: str | None = None
    needs_accelerators: bool = False

    def __post_init__(self) -> None:
        if unknown := self.capabilities - CAPABILITIES:
            raise ValueError(f"training engine {self.name}: {', '.join(sorted(unknown))} are not capabilities")
        if "sequence_parallel" in self.capabilities and self.sequence_size not in self.group_sizes:
            raise ValueError(f"training engine {self.name}: sequence_parallel needs a sequence_size in group_sizes")

    def load(self, path: str) -> Any:
        """Return what `path`, one of the attributes, names."""
        return resolve_name(path)


_ENGINES: dict[str, TrainEngineSpec] = {}


def register_train_engine(spec: TrainEngineSpec) -> None:
    """Make an engine available under its name. Registering it again is a no-op.

    Raises:
        ValueError: Another engine has that name.
    """
    if _ENGINES.setdefault(spec.name, spec) != spec:
        raise ValueError(f"a training engine {spec.name!r} is registered already, by {_ENGINES[spec.name]}")


def get_train_engine(name: str) -> TrainEngineSpec:
    """Return a registered engine."""
    return _ENGINES[name]


def list_train_engines(*, supporting: Capability | None = None) -> list[str]:
    """Return the names of the registered engines, or of those with a capability."""
    return [spec.name for spec in _ENGINES.values() if supporting is None or supporting in spec.capabilities]


register_train_engine(
    TrainEngineSpec(
        DEFAULT_ENGINE,
        "verl.training.fsdp.engine:FsdpEngine",
        "verl.training.fsdp.settings:FsdpSettings",
        CAPABILITIES,
        group_sizes=("ulysses_sequence_parallel_size",),
        sequence_size="ulysses_sequence_parallel_size",
    )
)
register_train_engine(
    TrainEngineSpec(
        "megatron",
        "verl.training.megatron.engine:MegatronEngine",
        "verl.training.megatron.settings:MegatronSettings",
        frozenset({"value_head", "squared_probs", "many_ranks", "expert_parallel", "bfloat16", "offload"}),
        section="megatron",
        group_sizes=(
            "megatron.tensor_model_parallel_size",
            "megatron.pipeline_model_parallel_size",
            "megatron.context_parallel_size",
        ),
        sequence_size="megatron.context_parallel_size",
        needs_accelerators=True,
    )
)
