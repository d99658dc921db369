"""A reward function and an estimator that never end: once each, when a file asks for it; the estimator on rank 1."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from verl.algorithms.advantages import AdvantageInputs

FOLDER = "VERL_SHOW_STALL"


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits in the answer."""
    if is_asked_for("reward"):
        never_ends()
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


def estimator(x: AdvantageInputs) -> Tensor:
    """GRPO's; its averages over groups are collective."""
    import torch.distributed

    from verl.algorithms.advantages import grpo

    if torch.distributed.get_rank() == 1 and is_asked_for("rank"):
        never_ends()
    return grpo(x)


def is_asked_for(what: str) -> bool:
    """Once: the file is taken away."""
    try:
        Path(os.environ[FOLDER], what).unlink()
    except FileNotFoundError:
        return False
    return True


def never_ends() -> None:
    while True:
        time.sleep(3600)
