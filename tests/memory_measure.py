"""Measures the memory of a training engine by running its code on fake tensors, as one rank of many.

Sharding, forward, backward, optimizer, weight sync and saving are those of `FsdpEngine`. The tensors have sizes but no
memory, and collectives return at once, so that a laptop can measure 72 billion parameters on 1,024 ranks.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from memory_tracker import FakeMemoryTracker, MemoryTracker
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from verl.algorithms.objective import PolicyObjective
from verl.data.flat_batch import FlatBatch
from verl.errors import EngineError
from verl.memory_plan.model_memory import PROBE_TOKENS
from verl.models.model_support import MODEL_ATTENTION
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.model import PackedCausalLM, PackedModel
from verl.training.fsdp.settings import FsdpSettings
from verl.training.kernels import attention
from verl.training.kernels.attention import PACKED_ATTENTION, register_attention
from verl.training.offload import Offloader
from verl.training.settings import EngineSettings, default_chunk
from verl.training.tensors import parse_dtype


def measure(
    config: Mapping[str, Any],
    settings: FsdpSettings,
    ranks: int,
    lengths: Sequence[int],
    *,
    prompt: int,
    accumulates: bool = True,
) -> dict[str, int]:
    """Return the peak in bytes of rank 0 by phase, for a policy with a Hugging Face `config`.

    With `settings.device` other than the CPU, attention is that of accelerators. A micro-batch has sequences of
    `lengths`, each with a prompt of `prompt` tokens. If it `accumulates` gradients, an update has a tiny micro-batch
    before it.
    """
    if settings.offload_policy or settings.lora is not None or settings.expert_parallel_size > 1:
        raise EngineError(
            "fake tensors cannot measure offload_policy, an adapter or expert parallelism; use the estimate"
        )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracker = FakeMemoryTracker(mode)
    with _one_of(ranks), _attention_of(settings.device), tracker.counting():
        resident = replace(settings, device="cpu", compile=False, param_offload=False, optimizer_offload=False)
        engine = FsdpEngine(resident, load=_Loader(config, mode, settings.device))
        engine._weights = _FakeOffloader(engine._weights._tensors, active=settings.param_offload)
        engine._moments = _FakeOffloader(engine._moments._tensors, active=settings.optimizer_offload)
        return measure_phases(engine, tracker, make_batch(lengths, prompt), accumulates=accumulates)


def measure_phases(
    engine: FsdpEngine, tracker: MemoryTracker, batch: FlatBatch, *, accumulates: bool = True
) -> dict[str, int]:
    """Return the peak of `tracker`, which is counting, in the phases of a training step with the optimizer's state."""
    tracker.add([*engine.model.parameters(), *engine.model.buffers()])
    with engine._weights.on_device():
        _end_phase(tracker)
        peaks = {"load": tracker.live}
    engine.state()  # creates the moments
    _end_phase(tracker)
    engine.forward([batch])
    peaks["log-probs"] = _end_phase(tracker)
    first = [make_batch([2], 1)] if accumulates else []  # it leaves gradients
    engine.update([*first, batch], PolicyObjective())
    peaks["update"] = _end_phase(tracker)
    deque(engine.weights(torch.bfloat16), maxlen=0)
    peaks["weight sync"] = _end_phase(tracker)
    engine.forward([make_batch([PROBE_TOKENS // 8] * 8, 1)])
    peaks["probe"] = _end_phase(tracker)
    engine.state()
    peaks["save"] = _end_phase(tracker)
    return peaks


def make_batch(lengths: Sequence[int], prompt: int) -> FlatBatch:
    """Return a micro-batch of sequences, all of whose tokens after the prompt are trained."""
    total, offsets = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    batch = FlatBatch(torch.zeros(total, dtype=torch.int64), offsets, torch.ones(total, dtype=torch.bool))
    zeros = torch.zeros(total)
    return batch.with_(mask=batch.positions >= prompt, old_logprobs=zeros, advantages=zeros)


def _end_phase(tracker: MemoryTracker) -> int:
    gc.collect()
    return tracker.reset_peak()


class _Loader:
    """Builds the model of a configuration, with fake weights; replaces `load_model`."""

    def __init__(self, config: Mapping[str, Any], mode: FakeTensorMode, device: str) -> None:
        self._config, self._mode, self._device = dict(config), mode, device

    def __call__(self, settings: EngineSettings, shard: Callable[[PackedModel], torch.device]) -> PackedCausalLM:
        kind = str(self._config.get("model_type"))
        if kind not in CONFIG_MAPPING:
            raise EngineError(f"model_type {kind}: this version of transformers does not have it")
        config = CONFIG_MAPPING[kind].from_dict(self._config)
        register_attention()
        with torch.device("meta"):
            dtype = parse_dtype(settings.param_dtype)
            hf = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=MODEL_ATTENTION)
        with self._mode:
            hf.to_empty(device="cpu")
        hf.tie_weights()
        chunk = settings.logprob_chunk or default_chunk(self._device, config.get_text_config().vocab_size)
        model = PackedCausalLM(hf, chunk, fp32_head=settings.fp32_lm_head).eval()
        model.backbone.set_attn_implementation(PACKED_ATTENTION)
        if settings.gradient_checkpointing and settings.trainable:
            model.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        shard(model)
        return model


class _FakeOffloader(Offloader):
    """Empties and refills storages without copying their content, which fake tensors do not have."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, active: bool) -> None:
        super().__init__(tensors, active=active)
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []
        self.offload()

    def copy_to_host(self, state: Any) -> Any:
        return state  # copies in host memory would be counted too

    def load(self) -> None:
        for storage, size in self._emptied:
            storage.resize_(size)
        self._emptied = []

    def offload(self) -> None:
        if not self.active or self._users or self._emptied:
            return
        for tensor in self._tensors():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            if storage.nbytes():
                self._emptied.append((storage, storage.nbytes()))
                storage.resize_(0)


@contextmanager
def _one_of(ranks: int) -> Iterator[None]:
    """Be rank 0 of a process group whose other ranks do not exist."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _attention_of(device: str) -> Iterator[None]:
    """Use the attention kernel of a device for fake tensors, which are on the CPU: other devices need a driver."""
    kernels = dict(attention._KERNELS)
    if (kernel := kernels.get(torch.device(device).type)) is not None:
        attention._KERNELS["cpu"] = kernel
    try:
        yield
    finally:
        attention._KERNELS.clear()
        attention._KERNELS.update(kernels)
