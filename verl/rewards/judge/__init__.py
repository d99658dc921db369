"""A language model as the judge: `reward.custom_reward_function.path=verl.rewards.judge`."""

from verl.rewards.judge.judge import compute_score, read_verdict

__all__ = ["compute_score", "read_verdict"]
