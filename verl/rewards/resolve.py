"""The scorer of a data source according to the settings, for checks and messages before a run."""

from __future__ import annotations

from verl.config.features import uses_reward_function
from verl.config.schema.root import Config
from verl.rewards.reward_function import describe_scorer
from verl.rewards.settings import RewardFunctionSettings


def resolve_scorer(config: Config, data_source: str) -> str | None:
    """Return the name of what scores these rows, for messages; None if nothing does. Loads nothing.

    >>> resolve_scorer(load(["reward.custom_reward_function.path=my_reward.py"], complete=False)[0].config, "sums")
    'my_reward.py:compute_score'
    """
    model, function = config.reward.reward_model, config.reward.custom_reward_function
    if not uses_reward_function(config):
        return f"reward model {model.model_path}"
    settings = RewardFunctionSettings(function.path, function.name, functions=config.reward.functions)
    scorer = describe_scorer(data_source, settings)
    return f"{scorer} + reward model {model.model_path}" if scorer is not None and model.enable else scorer
