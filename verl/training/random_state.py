"""The random state of a rank, which checkpoints hold."""

from __future__ import annotations

import torch
from torch import Tensor


def get_random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the generators of the CPU and the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def set_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `get_random_state` returned."""
    torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[device.type])
