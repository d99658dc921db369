"""Who scores the rows of a data source, as the settings say; asked before a run, by messages, and by `verl data`."""

from __future__ import annotations

from verl.config.features import uses_reward_function
from verl.config.schema.root import Config
from verl.rewards.reward_function import describe_scorer

__all__ = ["resolve_scorer"]


def resolve_scorer(config: Config, data_source: str) -> str | None:
    """The scorer as messages call it; None when nothing scores these rows. Loads nothing.

    >>> who_scores(load(["reward.custom_reward_function.path=my_reward.py"], complete=False)[0].config, "sums")
    'my_reward.py:compute_score'
    """
    model, function = config.reward.reward_model, config.reward.custom_reward_function
    if not uses_reward_function(config):
        return f"reward model {model.model_path}"
    scorer = describe_scorer(data_source, function.path, function.name, config.reward.functions)
    return f"{scorer} + reward model {model.model_path}" if scorer is not None and model.enable else scorer
