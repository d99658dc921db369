"""Ports for servers that are started a while after their port is chosen."""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ["free_port"]

_QUIET = range(20_000, 32_000)


def free_port() -> int:
    """A port of this machine that nobody listens on now, below those that systems give out to whoever asks for any.

    A rank imports torch between the choice and its use: one of the others might be given away meanwhile.
    """
    chance = random.SystemRandom()  # not the run's: ranks and runs that share a seed must not share ports
    while True:
        port = chance.choice(_QUIET)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
