"""Settings without effect: of data sets, of their files, order and lengths."""

from __future__ import annotations

from verl.config.ignored.rule import IgnoredRule
from verl.config.problems import prefix_keys

__all__ = ["DATA"]

DATA = (
    IgnoredRule(
        prefix_keys("data", "val_batch_size", "val_max_samples"),
        lambda c: c.data.val_files is None,
        "data.val_files is not given",
        ("data.val_files",),
    ),
    IgnoredRule(
        ("data.truncation",),
        lambda c: c.data.filter_overlong_prompts,
        "data.filter_overlong_prompts=true leaves nothing to cut",
        ("data.filter_overlong_prompts",),
    ),
    IgnoredRule(
        ("data.seed",),
        lambda c: not c.data.shuffle and c.data.sampler is None and c.data.train_weights is None,
        "data.shuffle=false",
        ("data.shuffle", "data.sampler", "data.train_weights"),
    ),
    IgnoredRule(
        ("data.shuffle",),
        lambda c: c.data.sampler is not None,
        "data.sampler is given, and has the last word on the order",
        ("data.sampler",),
    ),
    IgnoredRule(
        ("data.shuffle_buffer_size",),
        lambda c: c.data.streaming is False or not c.data.shuffle or bool(c.data.curriculum_key or c.data.sampler),
        "only a streamed data set (data.streaming=true) is shuffled by buffer, with data.shuffle=true",
        prefix_keys("data", "streaming", "shuffle", "curriculum_key", "sampler"),
    ),
    IgnoredRule(
        prefix_keys("data", "num_workers", "cache_dir"),
        lambda c: c.data.streaming is True and c.data.val_files is None,
        "data.streaming=true measures prompts when they are read",
        prefix_keys("data", "streaming", "val_files"),
    ),
)
