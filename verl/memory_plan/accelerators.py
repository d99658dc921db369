"""Public figures of accelerators, for estimates of memory and time."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, in GiB, operations and bytes per second.

    `flops` are dense bfloat16 operations; `link` connects the devices of a machine, `network` machines, per device and
    direction; `host` is the connection to host memory.
    """

    name: str
    memory_gib: float
    flops: float
    bandwidth: float
    link: float
    network: float
    host: float = 25e9

    @property
    def memory(self) -> int:
        """Memory in bytes."""
        return int(self.memory_gib * GIB)

    @property
    def vllm_sequences(self) -> int:
        """The sequences that vLLM 0.32 generates at once by default, as its `EngineArgs.get_batch_defaults` decides."""
        return 1024 if self.memory_gib >= 70 and self.name != "A100" else 256


DEVICES = {
    device.name: device
    for device in (
        Device("A100", 80, 312e12, 2.0e12, 300e9, 25e9),
        Device("H100", 80, 989e12, 3.35e12, 450e9, 50e9, host=50e9),
        Device("H200", 141, 989e12, 4.8e12, 450e9, 50e9, host=50e9),
        Device("B200", 180, 2250e12, 7.7e12, 900e9, 50e9, host=50e9),
        Device("MI300X", 192, 1307e12, 5.3e12, 448e9, 50e9, host=50e9),
    )
}
"""Name -> figures of the manufacturers, for the form with the fastest links (SXM, OAM)."""


def assume_device(memory: int) -> Device:
    """Return a device of which only the bytes of memory are known: as fast as an H100."""
    return replace(DEVICES["H100"], memory_gib=memory / GIB)


def find_device(name: str) -> Device | None:
    """Return the figures of a device by the name that its driver gives it, such as "NVIDIA H100 80GB HBM3"."""
    return next((device for short, device in DEVICES.items() if short in name.upper()), None)
