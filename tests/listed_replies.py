"""A model that says what it is given, token by token, for agents under test."""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from verl.types import Completion, SamplingParams


class ListedReplies:
    """Replies in order with `replies`, each ended by <|im_end|>, or cut at the limit of the request."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *replies: str) -> None:
        self._tokenizer, self._replies = tokenizer, list(replies)
        self.requests: list[list[int]] = []
        self.samplings: list[SamplingParams] = []

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        self.requests.append(list(token_ids))
        self.samplings.append(sampling)
        ids = self._tokenizer.encode(self._replies.pop(0), add_special_tokens=False)
        ids = [*ids, self._tokenizer.eos_token_id]
        reason = "stop" if len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        number = len(self.requests)
        return Completion(ids, np.full(len(ids), -number, np.float32), np.full(len(ids), 3, np.int32), reason)
