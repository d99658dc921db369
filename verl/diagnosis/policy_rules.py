"""Rules about the update of the policy: it moves too fast, becomes deterministic, or fails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

from verl.diagnosis.history import History
from verl.diagnosis.rule import Rule

_KL_LIMITS = {"actor/kl_loss": 1.0, "actor/reward_kl": 1.0, "actor/ppo_kl": 0.5}
_COLLAPSED, _ENTROPY_STEPS = 0.1, 10  # share of the first entropy; steps whose median it is
_MIN_RISE = 0.5  # standard deviations of the first rewards
_DRIFT, _DRIFT_STEPS, _WARM_UP = 5.0, 40, 5  # factor; steps that are looked at; steps before the first norm that counts


def _find_kl_explosion(run: History) -> str | None:
    for name, limit in _KL_LIMITS.items():
        if abs(value := run.get(name)) > limit:
            unit = " (aggregated by loss_agg_mode)" if name == "actor/kl_loss" else ""
            return f"the policy changes too fast: {name} is {value:.3g}{unit}, above the warning limit of {limit:g}"
    return None


KL_EXPLOSION = Rule(
    "kl-explosion",
    _find_kl_explosion,
    metrics=tuple(_KL_LIMITS),
    meaning=(
        "The policy is far from the reference, or from the policy that generated the responses. Its updates are too "
        "large; what it has learned before is soon lost."
    ),
    limits=(
        "; ".join(f"`{name}` above {limit:g}" for name, limit in _KL_LIMITS.items())
        + ", in absolute value. At 1 nat per token the reference would rarely generate these responses."
    ),
    remedy=(
        "try `actor_rollout_ref.actor.use_kl_loss=True` `actor_rollout_ref.actor.kl_loss_coef=0.01`, or a lower "
        "`actor_rollout_ref.actor.optim.lr`"
    ),
)


def _find_skipped_steps(run: History) -> str | None:
    skipped = sum(value for name, value in run.now.items() if name.endswith("/skipped_steps"))
    if skipped and "train/loss" in run.now:
        norm = run.get("train/grad_norm")
        why = "no token of it is trained" if norm == 0 else f"the gradient norm is {norm}"
        return f"step {run.step} did not change the weights: {why}"
    if skipped:
        return (
            f"{skipped:g} optimizer step(s) were skipped: the gradient was not finite, or the mini-batch had nothing "
            "to train on (no generated tokens, no pairs of different scores, all rejected)"
        )
    nans = sorted(name for name, value in run.now.items() if math.isnan(value) and not name.startswith("val/"))
    return f"metrics are NaN: {', '.join(nans[:4])}" if nans else None


SKIPPED_STEPS = Rule(
    "skipped-steps",
    _find_skipped_steps,
    metrics=("actor/skipped_steps", "critic/skipped_steps", "train/skipped_steps", "actor/grad_norm"),
    meaning=(
        "Numbers are NaN or infinite, or a mini-batch had nothing to train on. Optimizer steps without a finite "
        "gradient are skipped, so that the weights stay usable."
    ),
    limits="A skipped optimizer step, or a metric of the step that is NaN.",
    remedy=(
        "check `reward/min` and `reward/max` for outliers, and `response_length/min` for empty responses; try a lower "
        "`actor_rollout_ref.actor.optim.lr` or `actor_rollout_ref.actor.grad_clip=0.5`"
    ),
    sft_remedy="look at the rows of the step (`verl data`); try a lower `optim.lr` or `optim.grad_clip=0.5`",
)


def _find_entropy_collapse(run: History) -> str | None:
    entropies, rewards = run.values("actor/entropy"), run.values("reward/mean")
    if len(entropies) < 2 * _ENTROPY_STEPS or len(rewards) < 2 * _ENTROPY_STEPS:
        return None
    first, last = median(entropies[:_ENTROPY_STEPS]), median(entropies[-_ENTROPY_STEPS:])
    before, now = fmean(rewards[:_ENTROPY_STEPS]), fmean(rewards[-_ENTROPY_STEPS:])
    spread = median(run.values("reward/std")[:_ENTROPY_STEPS] or [0.0])
    if last > _COLLAPSED * first or now - before > _MIN_RISE * spread:
        return None
    return (
        f"the entropy of the policy has collapsed from {first:.3g} to {last:.3g}, while the reward only went from "
        f"{before:.3g} to {now:.3g}: all responses to a prompt become alike, and little more can be learned"
    )


ENTROPY_COLLAPSE = Rule(
    "entropy-collapse",
    _find_entropy_collapse,
    metrics=("actor/entropy", "reward/mean", "reward/std"),
    meaning=(
        "The policy is nearly deterministic before it has learned the task: it no longer tries different responses, "
        "and those to a prompt get the same reward. Entropy that falls because the task is solved is not a problem."
    ),
    limits=(
        f"The median of the last {_ENTROPY_STEPS} steps is at most {_COLLAPSED:.0%} of that of the first "
        f"{_ENTROPY_STEPS}, and the reward has risen by at most {_MIN_RISE:g} of its standard deviation at the start."
    ),
    remedy=(
        "try a lower `actor_rollout_ref.actor.optim.lr`, a higher upper clip ratio "
        "(`actor_rollout_ref.actor.clip_ratio_high=0.28`), an entropy bonus "
        "(`actor_rollout_ref.actor.entropy_coeff=0.001`), or more varied prompts"
    ),
)


def _find_gradient_drift(run: History) -> str | None:
    for name in ("actor/grad_norm", "train/grad_norm"):
        norms = run.values(name)[_WARM_UP:]
        if len(norms) < _DRIFT_STEPS:
            continue
        parts = [median(part) for part in _split(norms, 4)]
        if parts[-1] > _DRIFT * parts[0] and all(low < high for low, high in pairwise(parts)):
            return (
                f"the gradient norm keeps growing: {name} was {', '.join(f'{part:.3g}' for part in parts)} in the "
                f"four quarters of the {len(norms)} steps up to step {run.step}"
            )
    return None


def _split(values: Sequence[float], count: int) -> list[Sequence[float]]:
    """Return `count` parts of equal length, without the oldest values that are left over."""
    size = len(values) // count
    return [values[len(values) - (count - k) * size :][:size] for k in range(count)]


GRADIENT_DRIFT = Rule(
    "gradient-drift",
    _find_gradient_drift,
    metrics=("actor/grad_norm", "train/grad_norm"),
    meaning=(
        "The norm of the gradient before clipping grows over many steps: training becomes unstable, and often diverges "
        "soon. Clipping hides it from the loss, but then the direction of the updates is mostly noise."
    ),
    limits=(
        f"Over the run without its first {_WARM_UP} steps, and at least {_DRIFT_STEPS} steps: the medians of its four "
        f"quarters rise each time, the last to more than {_DRIFT:g} times the first. Single peaks do not change a "
        "median, and noise does not rise in each quarter."
    ),
    remedy=(
        "try a lower `actor_rollout_ref.actor.optim.lr`; check whether `training/rollout_probs_diff_mean` grows as "
        "well (`verl explain engine-mismatch`), and go back to a checkpoint before the growth"
    ),
    sft_remedy="try a lower `optim.lr`, and go back to a checkpoint before the growth",
)
