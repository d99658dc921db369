"""Rules about responses: truncated, empty, repetitive, or longer and longer."""

from __future__ import annotations

from statistics import fmean

from verl.diagnosis.history import History
from verl.diagnosis.rule import Rule

_MAX_TRUNCATED = 0.5  # share of the responses of a step
_DEGENERATE_STEPS = 3
_MAX_SHARES = {"response/repetitive_ratio": 0.2, "response/empty_ratio": 0.1}  # means of these steps
_LENGTH_WINDOW, _LENGTH_STEPS = 40, 10  # the first and the last steps of the window are compared
_LENGTH_FACTOR, _MIN_TOKENS, _SAME_REWARD = 2.0, 32, 0.1  # the last in standard deviations


def _find_truncated_responses(run: History) -> str | None:
    share = run.get("response_length/clip_ratio")
    return f"{share:.0%} of the responses were truncated by the length limit" if share > _MAX_TRUNCATED else None


TRUNCATED_RESPONSES = Rule(
    "truncated-responses",
    _find_truncated_responses,
    metrics=("response_length/clip_ratio",),
    meaning=(
        "Most responses end at the length limit, usually before the answer: they get no reward for what they were "
        "about to say, and the policy does not learn to end."
    ),
    limits=f"More than {_MAX_TRUNCATED:.0%} of the responses of a step.",
    remedy="try a larger `data.max_response_length`, or check that the model generates its end token",
)


def _find_degenerate_responses(run: History) -> str | None:
    for name, limit in _MAX_SHARES.items():
        shares = run.values(name, last=_DEGENERATE_STEPS)
        if len(shares) == _DEGENERATE_STEPS and fmean(shares) > limit:
            what = "mostly repeat themselves" if "repetitive" in name else "are empty"
            return f"{fmean(shares):.0%} of the responses of the last {_DEGENERATE_STEPS} steps {what} ({name})"
    return None


DEGENERATE_RESPONSES = Rule(
    "degenerate-responses",
    _find_degenerate_responses,
    metrics=tuple(_MAX_SHARES),
    meaning=(
        "The model repeats the same words, or ends at once. Either the chat template or the end token is wrong, or the "
        "policy has collapsed, or the reward prefers such responses."
    ),
    limits=(
        f"Means of {_DEGENERATE_STEPS} steps: more than {_MAX_SHARES['response/repetitive_ratio']:.0%} of the "
        "responses, of which more than half occurred before in the same response (in pieces of 8 tokens; from 64 "
        "tokens on), or more than "
        f" {_MAX_SHARES['response/empty_ratio']:.0%} that consist of the end token. Base models repeat "
        "themselves in some percent of their responses."
    ),
    remedy=(
        "read some (`verl show RUN`); check the prompts with their template (`verl data`) and the reward function; go "
        "back to a checkpoint before, with a lower `actor_rollout_ref.actor.optim.lr` or "
        "`actor_rollout_ref.actor.use_kl_loss=True`"
    ),
)


def _find_length_explosion(run: History) -> str | None:
    lengths, rewards = (run.values(name, last=_LENGTH_WINDOW) for name in ("response_length/mean", "reward/mean"))
    if min(len(lengths), len(rewards)) < 2 * _LENGTH_STEPS:
        return None
    before, now = fmean(lengths[:_LENGTH_STEPS]), fmean(lengths[-_LENGTH_STEPS:])
    rise = fmean(rewards[-_LENGTH_STEPS:]) - fmean(rewards[:_LENGTH_STEPS])
    spread = fmean(run.values("reward/std", last=_LENGTH_WINDOW) or [0.0])
    if now < max(_LENGTH_FACTOR * before, before + _MIN_TOKENS) or rise > _SAME_REWARD * spread:
        return None
    return (
        f"responses have grown from {before:.0f} to {now:.0f} tokens within {len(lengths)} steps, but the reward has "
        f"not risen ({rise:+.3g})"
    )


LENGTH_EXPLOSION = Rule(
    "length-explosion",
    _find_length_explosion,
    metrics=("response_length/mean", "reward/mean", "reward/std"),
    meaning=(
        "Responses become longer without becoming better. The loss may favor long responses, the policy may have lost "
        "its end token, or it hides from a penalty. Longer responses that earn more reward are not a problem."
    ),
    limits=(
        f"Within {_LENGTH_WINDOW} steps the length has doubled, by at least {_MIN_TOKENS} tokens, while the reward has "
        f"risen by at most {_SAME_REWARD:g} of its standard deviation; means of {_LENGTH_STEPS} steps are compared."
    ),
    remedy=(
        "penalize long responses with `reward.overlong_buffer.enable=True` `reward.overlong_buffer.len=128`, average "
        "the loss over tokens with "
        "`actor_rollout_ref.actor.loss_agg_mode=token-mean`, lower `actor_rollout_ref.actor.entropy_coeff` if it is "
        "set, and check that responses end with the end token"
    ),
)
