"""A reward function and an estimator that hang once each, when a file requests it; the estimator on rank 1."""

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
    """Return the share of digits in the response."""
    if is_requested("reward"):
        never_ends()
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


def estimator(x: AdvantageInputs) -> Tensor:
    """Return the advantages of GRPO, whose group averages are collective."""
    import torch.distributed

    from verl.algorithms.advantages import grpo

    if torch.distributed.get_rank() == 1 and is_requested("rank"):
        never_ends()
    return grpo(x)


def is_requested(name: str) -> bool:
    """Return whether the file exists, and remove it."""
    try:
        Path(os.environ[FOLDER], name).unlink()
    except FileNotFoundError:
        return False
    return True


def never_ends() -> None:
    while True:
        time.sleep(3600)
