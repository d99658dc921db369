"""How a reward worker ended, as its supervisor reports it, and the words for it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from verl.rewards.pool.worker import SOCKET_CLOSED

_OUR_MODULES = ("pool/worker", "reward_function", "compose")


@dataclass(frozen=True, slots=True)
class ExitReport:
    """The end of a worker: the status of `os.waitpid`, why it was killed (if we did), its last output and stack."""

    status: int | None
    reason: str = ""
    output: str = ""
    stack: str = ""
    is_supervisor_lost: bool = False

    def was_killed(self) -> bool:
        """Return whether it was probably killed by someone else, e.g. by the kernel's OOM killer."""
        return self.is_supervisor_lost or (not self.reason and self._signal() == signal.SIGKILL)

    def describe(self) -> str:
        if self.reason:
            return self.reason
        if (cause := self._signal()) is not None:
            return f"its process died of {cause.name}"
        assert self.status is not None
        code = os.WEXITSTATUS(self.status)
        if code == SOCKET_CLOSED:
            return "closed file descriptors that are not its own (os.closerange?)"
        return f"ended its process with exit code {code} (os._exit?)"

    def add_details(self, cause: str) -> str:
        """Append the user's part of the stack, and the last output."""
        frames = [line for line in self.stack.splitlines() if line.lstrip().startswith("File ")]
        ours = next((index for index, line in enumerate(frames) if _is_our_frame(line)), len(frames))
        if frames[:ours]:
            cause += "\nIts stack (innermost first):\n" + "\n".join(frames[:ours][:12])
        return f"{cause}\nIts last output:\n{self.output[-1000:]}" if self.output else cause

    def _signal(self) -> signal.Signals | None:
        if self.status is None or not os.WIFSIGNALED(self.status):
            return None
        return signal.Signals(os.WTERMSIG(self.status))


def _is_our_frame(line: str) -> bool:
    return "/asyncio/" in line or any(f"verl/rewards/{name}.py" in line for name in _OUR_MODULES)
