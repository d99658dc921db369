"""Loads a tokenizer without torch, whose import takes most of the time of a short check."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from verl.config.schema import Config
from verl.trainer.build.data import open_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECTION = "actor_rollout_ref.model"


def open_policy_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the trained model; raise a `ConfigError` if there is none.

    Code of the user, such as a tool or that of the model, may need transformers together with torch: with such
    settings both are imported.
    """
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    if not (model.trust_remote_code or model.external_modules or rollout.multi_turn.enable):
        with _without_torch():
            import transformers  # noqa: F401
            from transformers import AutoTokenizer  # noqa: F401
    return open_tokenizer(model, SECTION)


@contextmanager
def _without_torch() -> Iterator[None]:
    """Let transformers (5.0) find no torch while it is imported: tokenizers need none, and importing it takes seconds.

    To be removed when `import transformers.AutoTokenizer` no longer imports torch. None in `sys.modules` is Python's
    way of saying that a module cannot be imported.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    name = "TRANSFORMERS_VERBOSITY"  # without torch, transformers advises to install it
    before = os.environ.get(name)
    os.environ[name] = "error"
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
