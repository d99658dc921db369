"""Rollout engines in which one weight is wrong: importing this module registers them as "wrong_vllm" and "wrong_hf".

The weight is the one that WRONG_WEIGHT names, as in `model.layers.2.mlp.up_proj.weight`; without it, all are right.
It is changed as by a weight sync that repacks it wrongly: the engine itself runs as always.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from verl.config.rollout_engines import get_rollout_engine, register_rollout_engine
from verl.rollout.hf import HfEngine
from verl.rollout.vllm.engine import VllmEngine
from verl.weights.bucket import SharedBucket, WeightBucket, pack, unpack

VARIABLE = "WRONG_WEIGHT"


class WrongVllmEngine(VllmEngine):
    async def load_bucket(self, bucket: WeightBucket | SharedBucket) -> None:
        await super().load_bucket(spoil(bucket))


class WrongHfEngine(HfEngine):
    async def load_bucket(self, bucket: WeightBucket | SharedBucket) -> None:
        await super().load_bucket(spoil(bucket))


def spoil(bucket: WeightBucket | SharedBucket) -> WeightBucket:
    """Return a copy of a bucket; in it the columns of the wrong weight are in reverse order, or its scales doubled."""
    wrong = os.environ.get(VARIABLE)
    weights = (
        (name, (weight.flip(-1) if weight.ndim > 1 else weight * 2) if name == wrong else weight)
        for name, weight in unpack(bucket.slots, torch.from_numpy(bucket.data.copy()))
    )
    [spoiled] = pack(weights, max_bytes=2 * bucket.data.nbytes + 64 * len(bucket.slots))
    return spoiled


for engine, spoiled_engine in (("vllm", WrongVllmEngine), ("hf", WrongHfEngine)):
    register_rollout_engine(
        replace(get_rollout_engine(engine), name=f"wrong_{engine}", engine=f"{__name__}:{spoiled_engine.__name__}")
    )
