"""Properties of the NVIDIA accelerators of this machine, read without using them."""

from __future__ import annotations

import subprocess

_TIMEOUT_S = 30


def query_gpus(*fields: str, units: bool = False) -> list[str]:
    """Return one line per accelerator with its `fields`, as nvidia-smi names them; empty if there are none."""
    layout = "csv,noheader" if units else "csv,noheader,nounits"
    command = ("nvidia-smi", f"--query-gpu={','.join(fields)}", f"--format={layout}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()
