"""Rules about rewards: nothing to learn from, exploited, or missing."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from verl.diagnosis.history import History, Series
from verl.diagnosis.rule import Rule

_MAX_WITHOUT_SIGNAL = 0.9  # share of the prompts
_LARGE_REWARD, _OUTLIER_STDS = 10.0, 20.0  # both must be exceeded by an outlier
_SMOOTHING = 0.2  # weight of a step in the running mean that validations are compared with
_MIN_DIVERGENCE = 0.1  # relative fall of the validation and rise of the reward that indicate reward hacking
_DIVERGED_VALIDATIONS = 2  # in a row: one alone is below the best of many by chance, above all with few prompts
_MAX_UNSCORED, _UNSCORED_STEPS = 0.02, 3  # share of the responses, and the steps whose mean it is


def is_uniform(metrics: Mapping[str, float]) -> bool:
    """Return whether all responses of a step got the same reward."""
    low, high = metrics.get("reward/min"), metrics.get("reward/max")
    return low is not None and low == high


def _find_no_signal(run: History) -> str | None:
    if "actor/distillation_kl" in run.now:  # a teacher gives signal even if all rewards are equal
        return None
    if is_uniform(run.now):
        return f"all responses of the step got the same reward, {run.get('reward/min'):g}: nothing can be learned"
    share = run.get("reward/groups_without_signal")
    if share > _MAX_WITHOUT_SIGNAL:
        return f"for {share:.0%} of the prompts all responses got the same reward: little can be learned"
    return None


NO_SIGNAL = Rule(
    "no-signal",
    _find_no_signal,
    metrics=("reward/min", "reward/max", "reward/groups_without_signal"),
    meaning=(
        "Responses to a prompt are compared with each other. If all of them get the same reward, none is better, and "
        "the prompt teaches nothing: it is too hard, too easy, or the reward function misreads the responses."
    ),
    limits=(
        f"All rewards of a step are equal, or those of each prompt for more than {_MAX_WITHOUT_SIGNAL:.0%} of the "
        "prompts. Runs with a teacher learn from it instead, and are not warned."
    ),
    remedy=(
        "check some responses and the reward function; try more responses per prompt with "
        "`actor_rollout_ref.rollout.n=8`, prompts that the model sometimes solves, or "
        "`algorithm.filter_groups.enable=True` to replace such prompts"
    ),
)


def _find_unscored_episodes(run: History) -> str | None:
    if "episode/ended_unscored" not in run.now:
        return None
    return (
        "episodes reached their limit of tokens, turns or time before the agent returned a score: they are truncated "
        "and get 0"
    )


UNSCORED_EPISODES = Rule(
    "unscored-episodes",
    _find_unscored_episodes,
    metrics=("episode/ended_unscored",),
    meaning=(
        "A limit ended the conversation of an agent that scores itself, so that the episode has no score of its own. "
        "It counts as a failure, whatever the model did."
    ),
    limits="An episode of the step ended this way.",
    remedy=(
        "try a larger `data.max_response_length`, or catch the error of the limit in the agent and return a score "
        "(OpenAI's SDK raises BadRequestError with the code context_length_exceeded)"
    ),
)


def _find_reward_outlier(run: History) -> str | None:
    mean, std = run.now.get("reward/mean"), run.get("reward/std")
    if mean is None or not std:
        return None
    for name in ("reward/max", "reward/min"):
        value = run.get(name, mean)
        if abs(value) > _LARGE_REWARD and abs(value - mean) > _OUTLIER_STDS * std:
            return (
                f"one reward is an outlier: {name} is {value:.3g}, the mean {mean:.3g}; a single response dominates "
                "this update"
            )
    return None


REWARD_OUTLIER = Rule(
    "reward-outlier",
    _find_reward_outlier,
    metrics=("reward/mean", "reward/std", "reward/min", "reward/max"),
    meaning=(
        "One response got a reward far from all others. Advantages are relative to the spread of the rewards, so that "
        "this response outweighs all others in the update."
    ),
    limits=(
        f"A reward is above {_LARGE_REWARD:g} or below -{_LARGE_REWARD:g}, and more than {_OUTLIER_STDS:g} standard "
        "deviations from the mean: a rare correct response among many wrong ones is closer."
    ),
    remedy=(
        "return rewards in a fixed range, or clip them with `reward.functions=[{path: my_reward.py, clip: [-1, 1]}]`"
    ),
)


def _find_reward_hacking(run: History) -> str | None:
    """Return the validation that has fallen furthest below its best mean while the reward rose."""
    found: dict[float, str] = {}
    for name in run.list_validations():
        validations = run.get_series(name)
        rewards = _smooth(run.get_series("reward/mean"), validations.steps)
        points = [
            (mean, rewards[step], step)
            for step, mean in zip(validations.steps, validations.values, strict=True)
            if step in rewards  # a validation before the first step has no reward to compare with
        ]
        best, before, best_step = max(points, key=lambda point: (point[0], point[2]), default=(0.0, 0.0, 0))
        has_diverged = [
            mean < best - _MIN_DIVERGENCE * abs(best) and reward > before + _MIN_DIVERGENCE * abs(before)
            for mean, reward, _ in points[-_DIVERGED_VALIDATIONS:]
        ]
        if len(has_diverged) == _DIVERGED_VALIDATIONS and all(has_diverged):
            mean, reward, _ = points[-1]
            found[mean - best] = (
                f"possible reward hacking: since step {best_step} the reward rose from {before:.3g} to {reward:.3g}, "
                f"while {name} fell from {best:.3g} to {mean:.3g}"
            )
    return found[min(found)] if found else None


def _smooth(rewards: Series, at: list[int]) -> dict[int, float]:
    """Return the running mean of the rewards after each of the steps `at` that is not before the first one."""
    smoothed: dict[int, float] = {}
    points = iter(zip(rewards.steps, rewards.values, strict=True))
    point, mean = next(points, None), None
    for step in at:
        while point is not None and point[0] <= step:
            mean = point[1] if mean is None else mean + _SMOOTHING * (point[1] - mean)
            point = next(points, None)
        if mean is not None:
            smoothed[step] = mean
    return smoothed


REWARD_HACKING = Rule(
    "reward-hacking",
    _find_reward_hacking,
    metrics=("reward/mean", "val/<data source>/mean@<n>"),
    meaning=(
        "The policy has found responses that the reward function likes, but that do not solve the task: the reward of "
        "the training prompts rises while the validation falls. Read such responses with `verl show RUN --best 3`."
    ),
    limits=(
        f"In {_DIVERGED_VALIDATIONS} validations in a row, the mean is more than {_MIN_DIVERGENCE:.0%} below the best "
        f"one, and the reward, smoothed over about {1 / _SMOOTHING:.0f} steps, more than {_MIN_DIVERGENCE:.0%} above "
        "what it was then. A single validation of some hundred prompts may be so much below the best of many by chance."
    ),
    remedy=(
        "keep the policy closer to the reference with `actor_rollout_ref.actor.use_kl_loss=True` and a larger "
        "`actor_rollout_ref.actor.kl_loss_coef`, or `algorithm.use_kl_in_reward=True` and "
        "`algorithm.kl_ctrl.kl_coef=0.01`; or make the reward stricter (`reward.functions` combines several)"
    ),
)


def _find_scoring_errors(run: History) -> str | None:
    errors = run.values("reward/error_rate", last=_UNSCORED_STEPS)
    timeouts = run.values("reward/timeout_rate", last=_UNSCORED_STEPS)
    if len(errors) < _UNSCORED_STEPS or fmean(errors) + fmean(timeouts) <= _MAX_UNSCORED:
        return None
    return (
        f"responses could not be scored and are not trained on: over the last {_UNSCORED_STEPS} steps the reward "
        f"failed for {fmean(errors):.1%} of them, and timed out for {fmean(timeouts):.1%}"
    )


SCORING_ERRORS = Rule(
    "scoring-errors",
    _find_scoring_errors,
    metrics=("reward/error_rate", "reward/timeout_rate"),
    meaning=(
        "The reward function raises, returns no finite number, or takes too long. Such responses are dropped, which "
        "biases training: often it is one kind of response that cannot be scored."
    ),
    limits=(
        f"More than {_MAX_UNSCORED:.0%} of the responses, on average over {_UNSCORED_STEPS} steps; single failures of "
        "a sandbox or a server are no reason. Above `reward.max_failure_rate` the run stops."
    ),
    remedy=(
        "make the function return a score for every response, also for empty and malformed ones; the first failure of "
        "each step is printed with its response; for timeouts raise `reward.deadline_s`"
    ),
)
