"""Ports for servers that start a while after their port is chosen."""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(20_000, 32_000)
"""Below the ephemeral ports, which the system could hand out before the server listens."""


def free_port() -> int:
    """Return a port of this machine that is free now."""
    generator = random.SystemRandom()  # unseeded: ranks and runs that share a seed must not share ports
    while True:
        port = generator.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
