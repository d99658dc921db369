"""Advice about known training problems, recognized in the metrics: what is wrong, and which settings to try."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

Numbers = Mapping[str, float]

_SMOOTHING = 0.2  # weight of a step in the running mean that validations are compared with
_MIN_DIVERGENCE = 0.1  # relative fall of the validation and rise of the reward that indicate reward hacking
_LARGE_REWARD, _OUTLIER_STDS = 10.0, 20.0  # both must be exceeded by an outlier
_IDLE = 0.3  # share of a step
_KL_REMEDY = (
    "keep the policy closer to the reference with actor_rollout_ref.actor.use_kl_loss=True and a larger "
    "actor_rollout_ref.actor.kl_loss_coef, or algorithm.use_kl_in_reward=True and algorithm.kl_ctrl.kl_coef=0.01; or "
    "make the reward stricter (reward.functions combines several)"
)


class Diagnosis:
    """The problems of one run. Advice about the same problem is repeated only after `remind_after` steps."""

    def __init__(self, remind_after: int = 50) -> None:
        self._remind_after = remind_after
        self._last_advised: dict[str, int] = {}
        self._reward: float | None = None
        self._best: dict[str, tuple[float, float, int]] = {}  # validation -> its best mean, the reward then, the step

    def advise(self, metrics: Numbers, step: int, preview: str = "") -> list[str]:
        """Return advice about a step; `preview` describes a response, to show when all rewards are equal."""
        reward = metrics.get("reward/mean")
        if reward is not None:
            self._reward = reward if self._reward is None else self._reward + _SMOOTHING * (reward - self._reward)
        shown = f". {preview}" if preview and is_uniform(metrics) else ""
        problems = (*_find_reward_problems(metrics), *_find_training_problems(metrics))
        return [f"{text}{shown if name == 'no signal' else ''}" for name, text in problems if self._is_due(name, step)]

    def advise_validation(self, means: Numbers, step: int) -> list[str]:
        """Return advice about a validation whose means fall while the rewards of training rise."""
        lines = []
        for name, mean in means.items():
            if not name.startswith("val/") or "/mean@" not in name or self._reward is None:
                continue
            best, reward, best_step = self._best.get(name, (-math.inf, 0.0, 0))
            if mean >= best:
                self._best[name] = mean, self._reward, step
                continue
            has_fallen = mean < best - _MIN_DIVERGENCE * abs(best)
            has_risen = self._reward > reward + _MIN_DIVERGENCE * abs(reward)
            if has_fallen and has_risen and self._is_due(f"hacking {name}", step):
                lines.append(
                    f"possible reward hacking: since step {best_step} the reward rose from {reward:.3g} to "
                    f"{self._reward:.3g}, while {name} fell from {best:.3g} to {mean:.3g}; {_KL_REMEDY}"
                )
        return lines

    def _is_due(self, name: str, step: int) -> bool:
        is_due = name not in self._last_advised or step - self._last_advised[name] >= self._remind_after
        if is_due:
            self._last_advised[name] = step
        return is_due


def is_uniform(metrics: Numbers) -> bool:
    """Return whether all responses of a step got the same reward."""
    low, high = metrics.get("reward/min"), metrics.get("reward/max")
    return low is not None and low == high


def explain_all_zero(source: str, responses: int, truncated: int, preview: str) -> str:
    """Return advice about a validation in which all responses to a data source got 0."""
    cut = f"{truncated} of them were truncated: try a larger data.max_response_length. " if truncated else ""
    shown = f"{preview}. " if preview else ""
    return (
        f"validation: all {responses} responses to data source {source!r} got 0. {shown}{cut}"
        "Check that the prompts ask for the format that the scorer expects, that validation rows look like training "
        "rows (`verl data` shows both), and that validation is greedy "
        "(actor_rollout_ref.rollout.val_kwargs.temperature=0)"
    )


def _find_reward_problems(metrics: Numbers) -> Iterator[tuple[str, str]]:
    """Yield the name of each problem, and what is wrong and what to try."""
    remedy = (
        "check some responses and the reward function; try more responses per prompt with "
        "actor_rollout_ref.rollout.n=8, prompts that the model sometimes solves, or "
        "algorithm.filter_groups.enable=True to replace such prompts"
    )
    share = metrics.get("reward/groups_without_signal", 0.0)
    has_teacher = "actor/distillation_kl" in metrics  # a teacher gives signal even if all rewards are equal
    if is_uniform(metrics) and not has_teacher:
        reward = metrics["reward/min"]
        yield (
            "no signal",
            f"all responses of the step got the same reward, {reward:g}: nothing can be learned; {remedy}",
        )
    elif share > 0.9 and not has_teacher:
        yield (
            "no signal",
            f"for {share:.0%} of the prompts all responses got the same reward: little can be learned; {remedy}",
        )
    if "episode/ended_unscored" in metrics:
        yield (
            "ended unscored",
            "episodes reached their limit of tokens, turns or time before the agent returned a score: they are "
            "truncated and get 0; try a larger data.max_response_length, or catch the error of the limit in the agent "
            "and return a score (OpenAI's SDK raises BadRequestError with the code context_length_exceeded)",
        )
    mean, std = metrics.get("reward/mean"), metrics.get("reward/std")
    if mean is None or not std:
        return
    for name in ("reward/max", "reward/min"):
        value = metrics.get(name, mean)
        if abs(value) > _LARGE_REWARD and abs(value - mean) > _OUTLIER_STDS * std:
            yield (
                "outlier",
                f"one reward is an outlier: {name} is {value:.3g}, the mean {mean:.3g}; a single response dominates "
                "this update; return rewards in a fixed range, or clip them with "
                "reward.functions=[{path: my_reward.py, clip: [-1, 1]}]",
            )


def _find_training_problems(metrics: Numbers) -> Iterator[tuple[str, str]]:
    yield from _find_idle_devices(metrics)
    gap = metrics.get("training/rollout_probs_diff_mean", 0.0)
    if gap > 0.01 and not metrics.get("training/staleness"):  # expected if responses are older
        yield (
            "mismatch",
            "trainer and rollout engine compute different probabilities: training/rollout_probs_diff_mean is "
            f"{gap:.4f} (healthy: below 0.005); this is expected if top_p or top_k restrict sampling without "
            "keep_sampling_mask; otherwise try "
            "actor_rollout_ref.rollout.dtype=float32, with vLLM on long contexts "
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn=True, or correct for it with "
            "algorithm.rollout_correction.rollout_is=token",
        )
    for name, limit in (("actor/kl_loss", 1.0), ("actor/reward_kl", 1.0), ("actor/ppo_kl", 0.5)):
        if abs(value := metrics.get(name, 0.0)) > limit:
            unit = " (aggregated by loss_agg_mode)" if name == "actor/kl_loss" else ""
            yield (
                "kl",
                f"the policy changes too fast: {name} is {value:.3g}{unit}, above the warning limit of {limit:g}; try "
                "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01, or a lower "
                "actor_rollout_ref.actor.optim.lr",
            )
    skipped = sum(value for name, value in metrics.items() if name.endswith("/skipped_steps"))
    nans = sorted(name for name, value in metrics.items() if math.isnan(value) and not name.startswith("val/"))
    if skipped or nans:
        problem = (
            f"{skipped:g} optimizer step(s) were skipped: the gradient was not finite, or the mini-batch had nothing "
            "to train on (no generated tokens, no pairs of different scores, all rejected)"
        )
        yield (
            "not finite",
            f"{problem if skipped else 'metrics are NaN: ' + ', '.join(nans[:4])}; check reward/min and reward/max "
            "for outliers, and response_length/min for empty responses; try a lower actor_rollout_ref.actor.optim.lr "
            "or actor_rollout_ref.actor.grad_clip=0.5",
        )
    share = metrics.get("response_length/clip_ratio", 0.0)
    if share > 0.5:
        yield (
            "truncation",
            f"{share:.0%} of the responses were truncated by the length limit; try a larger data.max_response_length, "
            "or check that the model generates its end token",
        )


def _find_idle_devices(metrics: Numbers) -> Iterator[tuple[str, str]]:
    """Say which pool to enlarge where training and generation have devices of their own."""
    training, generation = metrics.get("perf/trainer_idle", 0.0), metrics.get("perf/generation_idle", 0.0)
    if training > _IDLE and training > generation:
        yield (
            "trainer waits",
            f"the train workers waited for responses during {training:.0%} of the step; give generation more of the "
            "devices (actor_rollout_ref.rollout.n_gpus_per_node), or let it run further ahead "
            "(async_training.staleness_threshold, trainer.max_staleness)",
        )
    elif generation > _IDLE:
        yield (
            "generation waits",
            f"no response was generated during {generation:.0%} of the step, because training is behind; give training "
            "more of the devices (trainer.n_gpus_per_node), or let generation run further ahead "
            "(async_training.staleness_threshold, trainer.max_staleness)",
        )
