"""What engines return: checks of their responses, and responses that several engines generate one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from verl.errors import CorruptEngineError, ProcessLostError
from verl.rollout.engine import ManagedEngine
from verl.types import Completion, SamplingParams

ROUNDING = 1e-3  # log-probs may exceed 0 by so much


def check_completion(completion: Completion, engine_id: int) -> Completion:
    """Return the completion with its engine; raise `CorruptEngineError` for log-probs that no model can have."""
    logprobs = completion.logprobs
    wrong = logprobs[~(np.isfinite(logprobs) & (logprobs <= ROUNDING))]
    if len(wrong) or len(logprobs) != len(completion.token_ids):
        found = f"a log-prob of {wrong[0]:g}" if len(wrong) else f"{len(logprobs)} log-probs"
        raise CorruptEngineError(
            f"rollout engine {engine_id} is corrupt: it returned {found} in a response of "
            f"{len(completion.token_ids)} tokens"
        )
    return replace(completion, engine=engine_id)


class PartialResponse:
    """A response that one engine after another continues when they are lost: tokens, log-probs and versions are kept.

    With a seed it starts again, since only the whole response is reproducible.
    """

    def __init__(self, token_ids: Sequence[int], sampling: SamplingParams) -> None:
        self._token_ids, self._sampling = list(token_ids), sampling
        self._parts: list[Completion] = []

    async def complete(self, engine: ManagedEngine, engine_id: int) -> Completion:
        """Let an engine generate what is missing; return the whole response."""
        done = [token for part in self._parts for token in part.token_ids]
        left = self._sampling.max_tokens - len(done)
        if done and (left <= 0 or done[-1] in self._sampling.stop_token_ids):  # only its end was lost
            reason = "stop" if done[-1] in self._sampling.stop_token_ids else "length"
            return replace(_join(self._parts), finish_reason=reason)
        rest = replace(self._sampling, max_tokens=left)
        try:
            last = check_completion(await engine.generate([*self._token_ids, *done], rest), engine_id)
        except ProcessLostError as error:
            if error.partial is not None and error.partial.token_ids and self._sampling.seed is None:
                self._parts.append(check_completion(error.partial, engine_id))
            raise
        return _join([*self._parts, last])


def _join(parts: Sequence[Completion]) -> Completion:
    """Return one completion of parts that continue each other, with the end and the engine of the last one."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[-1],
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=np.concatenate([part.versions for part in parts]),
        preemptions=sum(part.preemptions for part in parts),
        earlier_engines=frozenset(part.engine for part in parts[:-1]),
        kept_ids=None if parts[0].kept_ids is None else np.concatenate([part.kept_ids for part in parts]),
    )
