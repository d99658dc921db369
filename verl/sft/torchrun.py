"""Runs that are started with torchrun, as launch scripts of supervised training do."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence

_SIZES = {"trainer.n_gpus_per_node": "LOCAL_WORLD_SIZE", "trainer.nnodes": "GROUP_WORLD_SIZE"}
_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


def adapt_to_torchrun(
    argv: Sequence[str], environment: MutableMapping[str, str] = os.environ
) -> tuple[list[str], bool]:
    """Return the settings with torchrun's sizes, and whether this process runs.

    verl starts its own processes, so only the first one of torchrun runs, without torchrun's variables.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return list(argv), True
    given = {argument.lstrip("+").partition("=")[0] for argument in argv}
    sizes = [f"{key}={environment[name]}" for key, name in _SIZES.items() if key not in given and name in environment]
    is_first = environment.get("RANK", "0") == "0"
    for name in [name for name in environment if name in _VARIABLES or name.startswith("TORCHELASTIC_")]:
        del environment[name]
    return [*argv, *sizes], is_first
