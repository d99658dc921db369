"""The settings of a train worker, and the policy that it builds from them. Imports no Ray: a replay has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.algorithms.settings import AlgorithmSettings
from verl.cluster.hangs.pending_calls import DEFAULT_TIMEOUTS, Timeouts
from verl.training.registry import build_engine
from verl.training.settings import EngineSettings

if TYPE_CHECKING:  # torch is imported where it is used: see BaseTrainWorker
    from verl.training.engine import TrainEngine
    from verl.training.policy.trainer import PolicyTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The settings of one rank: the model that it trains, and how it is saved."""

    actor: EngineSettings
    seed: int = 0
    external_modules: Sequence[str] = ()  # imported before the engine is built
    tokenizer_path: str | None = None  # None: the model's
    save_hf: bool | None = False  # None: in the last checkpoint only
    save_contents: Mapping[str, Sequence[str]] | None = None  # by checkpoint folder; None: all
    load_contents: Mapping[str, Sequence[str]] | None = None
    timeouts: Timeouts = DEFAULT_TIMEOUTS
    deterministic: bool = False  # use deterministic kernels only; for accelerators
    memory_advice: str = ""  # the settings that reduce memory use, for the message of an out-of-memory error


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings(RankSettings):
    """The settings of a train worker: its models and the algorithm."""

    algorithm: AlgorithmSettings
    reference: EngineSettings | None = None
    reference_is_actor: bool = False  # with its adapter disabled
    critic: EngineSettings | None = None
    prime: EngineSettings | None = None  # PRIME's reward model
    prime_reference: EngineSettings | None = None  # None: `reference`
    teacher: EngineSettings | None = None
    sync_dtype: str = "bfloat16"
    sync_adapter_only: bool = False  # the engines load the base model themselves
    sync_bucket_bytes: int = 512 * 2**20
    is_one_machine: bool = True  # where all engines are, too
    shares_devices: bool = False  # with engines, which use the memory that is freed here
    engine_width: int = 1  # devices of an engine
    weight_sender: str | None = None  # a `WeightSender` of the rollout engine, package.module:name


def build_policy(settings: TrainSettings) -> PolicyTrainer:
    """Load the models of an algorithm; all ranks of the process group call it together."""
    from verl.training.policy.prime import PrimeRewardModel
    from verl.training.policy.trainer import PolicyTrainer

    def build(model: EngineSettings | None) -> TrainEngine[Any] | None:
        return None if model is None else build_engine(model)

    actor = build_engine(settings.actor)
    reference = actor.without_adapter() if settings.reference_is_actor else build(settings.reference)
    prime = None
    if settings.prime is not None:
        prime_reference = build(settings.prime_reference) or reference
        assert prime_reference is not None
        prime = PrimeRewardModel(build_engine(settings.prime), prime_reference, beta=settings.algorithm.prime_beta)
    return PolicyTrainer(
        actor,
        settings.algorithm,
        reference=reference,
        critic=build(settings.critic),
        prime=prime,
        teacher=build(settings.teacher),
    )
