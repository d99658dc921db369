"""Check the memory budget of large models: closed form against fake tensors, and fake tensors against real ones.

python tests/acceptance/budget.py [--short]

Fake tensors run the real sharding, passes, optimizer, weight sync and save as rank 0 of 8 to 1,024 ranks, and count the
bytes of live tensors; the closed form must be within 10% of their peak in every phase. For a small model, fake tensors
must be within 10% of the live tensors of 2 gloo ranks. Then `verl plan` must find settings with which 7B and 14B fit on
8 devices of 80 GiB, 32B on 32 and 72B on 64; 7B must fit at the defaults. Nothing here has run on an accelerator.
"""

import argparse
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from _common import ROOT, finish  # noqa: F401 - finds what tests share
from public_models import MODELS
from ranks import free_port, run_ranks
from tiny import tiny_qwen2
from transformers import Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from verl.budget.devices import DEVICES
from verl.budget.ledger import Ledger
from verl.budget.measure import make_batch, measure, measure_phases
from verl.budget.memory import ModelMemory, PassSize
from verl.budget.model_shape import ModelShape
from verl.training.fsdp import FsdpEngine
from verl.training.process_group import init_process_group
from verl.training.settings import FsdpSettings

GIB, LIMIT = 1 << 30, 0.10
LARGE = {"compute_dtype": "bfloat16", "gradient_checkpointing": True}


@dataclass(frozen=True)
class Case:
    """A model on a number of ranks, with one micro-batch of sequences of equal length, 3/4 of them prompt."""

    model: str
    ranks: int
    sequences: int
    length: int
    options: dict = field(default_factory=dict)
    accumulates: bool = False

    @property
    def settings(self):
        return FsdpSettings(self.model, **LARGE | self.options)

    def measure(self):
        lengths = [self.length] * self.sequences
        return measure(
            MODELS[self.model],
            self.settings,
            self.ranks,
            lengths,
            prompt=3 * self.length // 4,
            accumulates=self.accumulates,
        )

    def estimate(self):
        size = PassSize(self.sequences * self.length, self.sequences * (self.length - 3 * self.length // 4))
        shape = ModelShape.from_config(MODELS[self.model])
        memory = ModelMemory(shape, self.settings, self.ranks, size, size, 2 if self.accumulates else 1)
        return {phase: usage.total for phase, usage in memory.peaks().items()}


PLAIN = {"gradient_checkpointing": False}
OFFLOAD = {"param_offload": True, "optimizer_offload": True}
CASES = (
    Case("Qwen2.5-0.5B", 8, 4, 1024),
    Case("Qwen2.5-0.5B", 8, 4, 1024, PLAIN),
    Case("Qwen2.5-0.5B", 8, 8, 2048, accumulates=True),
    Case("Qwen2.5-0.5B", 64, 8, 2048, {"reshard_after_forward": False}),
    Case("Qwen2.5-0.5B", 1024, 16, 1024, {"logprob_chunk": 1024}),
    Case("Qwen2.5-7B", 8, 8, 1024),
    Case("Qwen2.5-7B", 8, 8, 2048, OFFLOAD, accumulates=True),
    Case("Qwen2.5-7B", 8, 2, 2048, PLAIN),
    Case("Qwen2.5-7B", 8, 1, 32768),
    Case("Qwen2.5-7B", 64, 8, 1024, {"optimizer": "adamw", "optimizer_offload": True}),
    Case("Qwen2.5-7B", 1024, 8, 2048),
    Case("Qwen2.5-14B", 8, 8, 1024),
    Case("Qwen2.5-14B", 8, 8, 2048, OFFLOAD),
    Case("Qwen2.5-14B", 128, 16, 1024),
    Case("Qwen3-30B-A3B", 8, 4, 1024),
    Case("Qwen3-30B-A3B", 64, 8, 2048),
    Case("Qwen3-30B-A3B", 512, 8, 1024),
    Case("Qwen2.5-32B", 32, 8, 2048),
    Case("Qwen2.5-32B", 256, 8, 1024),
    Case("Qwen2.5-72B", 64, 8, 2048),
    Case("Qwen2.5-72B", 1024, 8, 1024),
)
SHORT = (CASES[0], CASES[1])
