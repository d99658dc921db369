"""Importing this module lets strategy=megatron train on a machine without accelerators: for tests.

A run uses it with `actor_rollout_ref.model.external_lib=tests.megatron_on_cpu`.
"""

from dataclasses import replace

from tests.cuda_stand_in import megatron_on_cpu
from verl.config import train_engines

_spec = train_engines.get_train_engine("megatron")
train_engines._ENGINES["megatron"] = replace(_spec, needs_accelerators=False)
STAND_IN = megatron_on_cpu()
STAND_IN.__enter__()  # for the life of the process
