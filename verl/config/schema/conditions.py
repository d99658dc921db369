"""Conditions for a setting to have an effect, declared with it: `setting(..., only_if=needs(".enable"))`.

Keys that start with a dot are in the setting's own section; other keys are absolute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from verl.config.rollout_engines import get_rollout_engine

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
ESTIMATOR = "algorithm.adv_estimator"
LOSS = f"{ACTOR}.policy_loss.loss_mode"


@dataclass(frozen=True, slots=True)
class OnlyIf:
    """A setting has an effect only if `holds` is true, given the values of `keys`; else `reason` is reported.

    In the reason, {section} stands for the section of the setting and {value} for the value of the first key.
    """

    keys: tuple[str, ...]
    holds: Callable[..., Any]
    reason: str

    def resolve(self, key: str) -> OnlyIf:
        """Return the same condition with absolute keys, for the setting `key`."""
        section = key.rpartition(".")[0]
        keys = tuple(f"{section}{other}" if other.startswith(".") else other for other in self.keys)
        return replace(self, keys=keys, reason=self.reason.replace("{section}", section))

    def find_reason(self, *values: Any) -> str | None:
        """Return why a setting has no effect, given the values of `keys`; None if it has one."""
        return None if self.holds(*values) else self.reason.replace("{value}", str(values[0]))


@dataclass(frozen=True, slots=True)
class _NeedsEngine(OnlyIf):
    def resolve(self, key: str) -> OnlyIf:
        condition = OnlyIf.resolve(self, key)
        setting = key.removeprefix(condition.keys[0].removesuffix("name"))
        return replace(condition, holds=lambda name: setting in get_rollout_engine(name).capabilities.settings)


def needs(key: str, *values: Any, reason: str = "") -> OnlyIf:
    """Only if `key` has one of `values`, by default true. A user's own function may use any setting."""
    accepted = values or (True,)
    names = " or ".join(str(value) for value in values)
    reason = reason or (f"only {_show(key)}={names} uses it" if values else f"{_show(key)}=false")
    return OnlyIf((key,), lambda value: value in accepted or is_custom_function(value), reason)


def unless(key: str, *values: Any, reason: str = "") -> OnlyIf:
    """Only if `key` has none of `values`."""
    shown = "true" if values == (True,) else " or ".join(str(value) for value in values)
    return OnlyIf((key,), lambda value: value not in values, reason or f"{_show(key)}={shown}")


def needs_engine(key: str) -> OnlyIf:
    """Only if the rollout engine that `key` names supports the setting."""
    return _NeedsEngine((key,), lambda name: True, f"{_show(key)}={{value}}")


def needs_given(key: str) -> OnlyIf:
    """Only if `key` is given."""
    return OnlyIf((key,), lambda value: value is not None, f"{_show(key)} is not given")


def unless_given(key: str, because: str = "") -> OnlyIf:
    """Only if `key` is not given, or empty; `because` is added to the reason."""
    return OnlyIf((key,), lambda value: value in (None, []), f"{_show(key)} is given{because}")


def is_custom_function(name: object) -> bool:
    """Whether an estimator or a loss is a function of the user, written as package.module:function."""
    return isinstance(name, str) and ":" in name


def _show(key: str) -> str:
    return "{section}" + key if key.startswith(".") else key


HAS_ADVANTAGES = unless(LOSS, "dpo", "sppo", reason=f"{LOSS}=dpo and sppo compare scores, without advantages")
HAS_CRITIC = OnlyIf(
    ("critic.enable", ESTIMATOR),
    lambda enable, estimator: estimator == "gae" if enable is None else enable,
    f"only {ESTIMATOR}=gae trains a critic, or your own estimator with critic.enable=true",
)
HAS_DEVICE_MEMORY = unless("trainer.device", "cpu", reason="on CPU (trainer.device) everything is in host memory")
DYNAMIC = f"{ACTOR}.use_dynamic_bsz"


def may_batch_by_tokens(dynamic: bool | None, device: str) -> bool:
    """Whether micro-batches may be limited by tokens; by default they are on accelerators."""
    return device != "cpu" if dynamic is None else dynamic


def may_batch_by_samples(dynamic: bool | None, device: str) -> bool:
    """Whether micro-batches may be limited by samples; by default they are on the CPU."""
    return device != "cuda" if dynamic is None else not dynamic


BY_TOKENS = OnlyIf((DYNAMIC, "trainer.device"), may_batch_by_tokens, f"{DYNAMIC} is false (the default on the CPU)")
BY_SAMPLES = OnlyIf((DYNAMIC, "trainer.device"), may_batch_by_samples, f"{DYNAMIC} is true (the default on GPUs)")
