"""Ports for servers that are started a while after their port is chosen."""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ["free_port"]

_QUIET = range(20_000, 32_000)


def free_port() -> int:
    """A port of this machine that nobody listens on now, below those that systems give out to whoever asks for any.

    For who cannot listen at once, and tell the port then: any other might be given away before it is used.
    """
    chance = random.SystemRandom()  # not the run's: ranks and runs that share a seed must not share ports
    while True:
        port = chance.choice(_QUIET)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
