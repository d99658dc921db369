"""Settings without effect: of the engines that generate."""

from __future__ import annotations

from verl.config.ignored.rule import IgnoredRule
from verl.config.problems import ROLLOUT, prefix_keys

__all__ = ["GENERATION"]

_ENGINE_ONLY = (
    "gpu_memory_utilization",
    "cpu_cache_gib",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enforce_eager",
    "load_format",
    "engine_kwargs.vllm",
)

GENERATION = (
    IgnoredRule(
        prefix_keys(ROLLOUT, "calculate_log_probs"),
        lambda c: True,
        "the engine gives the log-probs of what it draws at no cost, and they are always compared",
        (),
    ),
    IgnoredRule(
        prefix_keys(ROLLOUT, *_ENGINE_ONLY),
        lambda c: c.actor_rollout_ref.rollout.name == "hf",
        f"{ROLLOUT}.name=hf",
        (f"{ROLLOUT}.name",),
    ),
    IgnoredRule(
        prefix_keys(ROLLOUT, "val_kwargs.temperature", "val_kwargs.top_p", "val_kwargs.top_k"),
        lambda c: c.actor_rollout_ref.rollout.val_kwargs.do_sample is False,
        f"{ROLLOUT}.val_kwargs.do_sample=false is greedy",
        (f"{ROLLOUT}.val_kwargs.do_sample",),
    ),
    IgnoredRule(
        prefix_keys(ROLLOUT, "val_kwargs.top_p", "val_kwargs.top_k"),
        lambda c: c.actor_rollout_ref.rollout.val_kwargs.temperature == 0,
        f"{ROLLOUT}.val_kwargs.temperature=0 is greedy",
        (f"{ROLLOUT}.val_kwargs.temperature",),
    ),
    IgnoredRule(
        prefix_keys(ROLLOUT, "gpu_memory_utilization"),
        lambda c: c.trainer.device == "cpu",
        f"trainer.device=cpu; {ROLLOUT}.cpu_cache_gib is what counts",
        ("trainer.device",),
    ),
    IgnoredRule(
        prefix_keys(ROLLOUT, "cpu_cache_gib"),
        lambda c: c.trainer.device == "cuda",
        f"trainer.device=cuda; {ROLLOUT}.gpu_memory_utilization is what counts",
        ("trainer.device",),
    ),
)
