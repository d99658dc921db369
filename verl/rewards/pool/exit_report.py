"""The end of a scoring process in words, from what its keeper reports: how it ended, where it was, what it printed."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from verl.rewards.pool.worker import CHANNEL_LOST

__all__ = ["how_it_ended", "was_killed", "with_stack"]


def how_it_ended(report: Mapping[str, Any]) -> str:
    if report["why"]:
        return str(report["why"])
    status = report["status"]
    if os.WIFSIGNALED(status):
        return f"its process died of {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.WEXITSTATUS(status)
    if code == CHANNEL_LOST:
        return "closed file descriptors that are not its own (os.closerange?)"
    return f"ended its process with exit code {code} (os._exit?)"


def was_killed(report: Mapping[str, Any]) -> bool:
    """Whether somebody ended it who was not one of us: the kernel for want of memory, or a human."""
    status = report["status"]
    return bool(report.get("keeper")) or (
        not report["why"] and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    )


def with_stack(what: str, report: Mapping[str, Any]) -> str:
    """What happened, where the function was, and the last that it printed."""
    stack = [line for line in report.get("stack", "").splitlines() if line.lstrip().startswith("File ")]
    ours = next((place for place, line in enumerate(stack) if _is_ours(line)), len(stack))
    if stack[:ours]:
        what += "\nIt was here (innermost first):\n" + "\n".join(stack[:ours][:12])
    printed = report.get("output", "")
    return f"{what}\nThe last that it printed:\n{printed[-1000:]}" if printed else what


_OWN_MODULES = ("pool/worker", "reward_function", "compose")


def _is_ours(line: str) -> bool:
    return "/asyncio/" in line or any(f"verl/rewards/{name}.py" in line for name in _OWN_MODULES)
