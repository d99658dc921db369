"""What is broken on purpose in `verl gpu-check`: each function gets a method, and returns what takes its place."""

from __future__ import annotations

import dataclasses
import re

LOST_LAYER, WRONG_LAYER = ".1.", ".2."


def corrupt_weights(load_bucket):
    """Return a `load_bucket` that moves the rows of the matrices of a layer by one."""
    import numpy as np

    async def load_corrupted(self, bucket):
        data = np.array(bucket.data)
        for slot in bucket.slots:
            if WRONG_LAYER in slot.name and len(slot.shape) == 2:
                size = np.dtype("float32").itemsize * int(np.prod(slot.shape))
                rows = data[slot.offset : slot.offset + size].reshape(slot.shape[0], -1)
                rows[:] = np.roll(rows, 1, axis=0)
        await load_bucket(self, dataclasses.replace(bucket, data=data))

    return load_corrupted


def lose_bucket(load_bucket):
    """Return a `load_bucket` that drops the bucket of a layer."""

    async def load_some(self, bucket):
        if not any(LOST_LAYER in slot.name for slot in bucket.slots):
            await load_bucket(self, bucket)

    return load_some


def stay_awake(sleep):
    """Return a `sleep` that does nothing."""

    async def sleep_never(self):
        self._is_asleep = True

    return sleep_never


def remove_gradient(call):
    """Return an objective without a gradient."""

    def call_without_gradient(self, *arguments):
        loss, metrics = call(self, *arguments)
        return loss * 0, metrics

    return call_without_gradient


def believe_all(compare_logprobs):
    """Return a comparison that accepts every engine."""
    return lambda *arguments, **options: (0.0, {})


def name_cuda_build(find_torch_problem):
    """Return the check of the driver as for a torch that is built for CUDA 13, whatever torch this is."""
    from verl.cluster import cuda_build

    class Build:
        version = re.sub(r"\+.*", "", cuda_build.distribution("torch").version)

        def read_text(self, name):
            return "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"

    def find_problem():
        cuda_build.distribution = lambda name: Build()
        return find_torch_problem()

    return find_problem
