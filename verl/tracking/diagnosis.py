"""Known troubles, seen in the numbers while they happen: what was seen, and which override to try."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Diagnosis", "all_zero", "diagnose", "is_uniform"]

Numbers = Mapping[str, float]

_SMOOTHING = 0.2  # of the reward that validations are compared with
_APART = 0.1  # share by which the one must have fallen and the other risen
_LARGE, _FAR = 10.0, 20.0  # a reward beyond the first, and so many standard deviations from the mean, is a spike
_LEASH = (
    "hold it closer to where it began by actor_rollout_ref.actor.use_kl_loss=True and a larger "
    "actor_rollout_ref.actor.kl_loss_coef, or algorithm.use_kl_in_reward=True and algorithm.kl_ctrl.kl_coef=0.01; or "
    "let the reward check more (reward.functions adds several)"
)


@dataclass(frozen=True, slots=True)
class _Trouble:
    """`sees` returns what it saw, in words, or None."""

    name: str
    sees: Callable[[Numbers], str | None]
    remedy: str


def diagnose(metrics: Numbers) -> list[str]:
    """One line for each trouble that the metrics of one step show; none when all is well."""
    return [line for _, line in _found(metrics)]


class Diagnosis:
    """Remembers what it said: the same advice comes again only after `remind_after` steps."""

    def __init__(self, remind_after: int = 50) -> None:
        self._remind_after = remind_after
        self._said: dict[str, int] = {}
        self._reward: float | None = None
        self._best: dict[str, tuple[float, float, int]] = {}  # validation -> the best, the reward then, the step

    def advise(self, metrics: Numbers, step: int, exhibit: str = "") -> list[str]:
        """What is worth saying now; `exhibit` is an answer to show where all rewards are the same."""
        reward = metrics.get("reward/mean")
        if reward is not None:
            self._reward = reward if self._reward is None else self._reward + _SMOOTHING * (reward - self._reward)
        lines = []
        for name, line in _found(metrics):
            if self._is_due(name, step):
                lines.append(f"{line}. {exhibit}" if exhibit and name == "no signal" and is_uniform(metrics) else line)
        return lines

    def advise_validation(self, means: Numbers, step: int) -> list[str]:
        """What a validation shows beside the rewards of training: they must not part."""
        lines = []
        for name, mean in means.items():
            if not name.startswith("val/") or "/mean@" not in name or self._reward is None:
                continue
            best, reward, when = self._best.get(name, (-math.inf, 0.0, 0))
            if mean >= best:
                self._best[name] = mean, self._reward, step
                continue
            apart = mean < best - _APART * abs(best) and self._reward > reward + _APART * abs(reward)
            if apart and self._is_due(f"hacking {name}", step):
                lines.append(
                    f"the reward rose from {reward:.3g} at step {when} to {self._reward:.3g}, while {name} fell from "
                    f"{best:.3g} to {mean:.3g}: the model may have learned to please the reward function; {_LEASH}"
                )
        return lines

    def _is_due(self, name: str, step: int) -> bool:
        due = name not in self._said or step - self._said[name] >= self._remind_after
        if due:
            self._said[name] = step
        return due


def is_uniform(metrics: Numbers) -> bool:
    """Whether all answers of a step got the same reward."""
    low, high = metrics.get("reward/min"), metrics.get("reward/max")
    return low is not None and low == high


def all_zero(source: str, answers: int, cut: int, exhibit: str) -> str:
    """What to say of a validation in which every answer got 0; `cut` of them were cut by the length limit."""
    limit = f"{cut} of them were cut by the length limit: try a larger data.max_response_length. " if cut else ""
    return (
        f"validation: all {answers} answers to data source {source!r} got 0. {exhibit}{'. ' if exhibit else ''}{limit}"
        "Look whether the prompts ask for what the scorer reads, whether validation rows are like training rows "
        "(`verl data` shows both), and whether validation is greedy "
        "(actor_rollout_ref.rollout.val_kwargs.temperature=0)"
    )


def _no_signal(metrics: Numbers) -> str | None:
    if is_uniform(metrics):
        return (
            f"every answer of the step got the same reward, {metrics['reward/min']:g}: there is nothing to learn from"
        )
    silent = metrics.get("reward/groups_without_signal", 0.0)
    if silent > 0.9:
        return f"for {silent:.0%} of the prompts all answers got the same reward: there is little to learn from"
    return None


def _spike(metrics: Numbers) -> str | None:
    mean, std = metrics.get("reward/mean"), metrics.get("reward/std")
    if mean is None or not std:
        return None
    for name in ("reward/max", "reward/min"):
        value = metrics.get(name, mean)
        if abs(value) > _LARGE and abs(value - mean) > _FAR * std:
            return f"one reward is far from all others: {name} is {value:.3g}, the mean {mean:.3g}"
    return None


def _mismatch(metrics: Numbers) -> str | None:
    gap = metrics.get("training/rollout_probs_diff_mean", 0.0)
    if gap > 0.01:
        return (
            f"trainer and rollout engine disagree: training/rollout_probs_diff_mean is {gap:.4f} (healthy: below 0.005)"
        )
    return None


def _kl_explodes(metrics: Numbers) -> str | None:
    for name, limit in (("actor/kl_loss", 1.0), ("actor/reward_kl", 1.0), ("actor/ppo_kl", 0.5)):
        if abs(value := metrics.get(name, 0.0)) > limit:
            count = " (counted as loss_agg_mode says)" if name == "actor/kl_loss" else ""
            return f"the policy runs away: {name} is {value:.3g}{count}; the limit of this warning is {limit:g}"
    return None


def _skipped(metrics: Numbers) -> str | None:
    if count := sum(value for name, value in metrics.items() if name.endswith("/skipped_steps")):
        return (
            f"{count:g} optimiser step(s) were skipped: the gradient was not finite, or nothing in the mini-batch was "
            "left to train on (no generated tokens, no pairs of different scores, all rejected)"
        )
    broken = sorted(name for name, value in metrics.items() if math.isnan(value) and not name.startswith("val/"))
    return f"not a number: {', '.join(broken[:4])}" if broken else None


def _cut(metrics: Numbers) -> str | None:
    share = metrics.get("response_length/clip_ratio", 0.0)
    return f"{share:.0%} of the answers were cut by the length limit before they ended" if share > 0.5 else None


_TROUBLES = (
    _Trouble(
        "no signal",
        _no_signal,
        "look at some answers and at the reward function; more answers a prompt with actor_rollout_ref.rollout.n=8, "
        "prompts that the model sometimes solves, or algorithm.filter_groups.enable=True to draw others in their place",
    ),
    _Trouble(
        "spike",
        _spike,
        "such a step moves the policy by one answer; return rewards in a fixed range, or hold them there by "
        "reward.functions=[{path: my_reward.py, clip: [-1, 1]}]",
    ),
    _Trouble(
        "mismatch",
        _mismatch,
        "where top_p or top_k cut the sampling, that is expected; else try actor_rollout_ref.rollout.dtype=float32, "
        "with vLLM on long contexts +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn=True, "
        "or correct for it by algorithm.rollout_correction.rollout_is=token",
    ),
    _Trouble(
        "kl",
        _kl_explodes,
        "try actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01, "
        "or a lower actor_rollout_ref.actor.optim.lr",
    ),
    _Trouble(
        "not finite",
        _skipped,
        "look at reward/min and reward/max for outliers, and at response_length/min for empty answers; try a lower "
        "actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.grad_clip=0.5",
    ),
    _Trouble("cut", _cut, "try a larger data.max_response_length, or check that the model knows its end token"),
)


def _found(metrics: Numbers) -> list[tuple[str, str]]:
    return [(one.name, f"{seen}; {one.remedy}") for one in _TROUBLES if (seen := one.sees(metrics)) is not None]
