"""How much of a response repeats what the same response said before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_PIECE = 8  # tokens; shorter pieces recur in any text
_MIN_TOKENS = 64  # a shorter response has too few pieces for a share
_FACTORS = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, _PIECE + 1, dtype=np.uint64)  # odd, of 64 bits: wraps around


def measure_repetition(tokens: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_]) -> float:
    """Return the share of the pieces of 8 generated tokens that occurred before in the same reply.

    0 for fewer than 64 generated tokens. Replies are counted one by one: turns of an agent often begin alike.

    Args:
        tokens: All tokens of the sample [T].
        mask: Whether the model generated them [T].
    """
    if mask.sum() < _MIN_TOKENS:
        return 0.0
    starts = np.flatnonzero(np.diff(mask)) + 1
    replies = [part for part, own in zip(np.split(tokens, starts), np.split(mask, starts), strict=True) if own[0]]
    pieces = [_hash_pieces(reply) for reply in replies if len(reply) >= _PIECE]
    count = sum(map(len, pieces))
    return 1.0 - sum(len(np.unique(each)) for each in pieces) / count if count else 0.0


def _hash_pieces(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """Return a hash of each piece of consecutive tokens: [T] -> [T - 7]."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64) + np.uint64(1), _PIECE)
    return (windows * _FACTORS).sum(-1, dtype=np.uint64)
