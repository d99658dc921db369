"""Runs inside vLLM's worker processes: the receiving end of our transports, and their exit.

vLLM imports the module named in `worker_extension_cls` in each worker process; the import registers the transport.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from verl.rollout.vllm.ipc_handles import decode_handles
from verl.weights.bucket import TensorSlot, unpack
from verl.weights.layer_outputs import LayerOutputs, find_layers

BACKENDS = {"host": "verl_host", "ipc": "verl_ipc", "nccl": "nccl"}
"""Transports, and the names of their receiving ends in vLLM."""
EXTENSION = "verl.rollout.vllm.transfer.WorkerExtension"


class WorkerExtension:
    """Mixed into vLLM's worker: what the rollout actor calls there. Importing this module also matters."""

    model_runner: Any
    rank: int
    _outputs: LayerOutputs

    def unlink_shared_memory(self) -> None:
        """Remove the names of the memory that tensor-parallel workers share, so that it is freed however they end.

        Killed processes would leave it behind. It stays mapped, and no process has to open it again.
        """
        with open("/proc/self/maps") as file:
            mapped = {fields[5] for line in file if len(fields := line.split(maxsplit=5)) == 6}
        for path in mapped:
            if path.startswith(("/dev/shm/vllm_dist", "/dev/shm/psm_")):
                Path(path.strip()).unlink(missing_ok=True)

    def seed_sampling(self, seed: int) -> None:
        """Seed the generator that samples for requests without a seed."""
        torch.manual_seed(seed)

    def record_layers(self) -> None:
        """Record what the decoder layers return, until `write_layers`."""
        count = self.model_runner.model_config.hf_text_config.num_hidden_layers
        self._outputs = LayerOutputs(find_layers(self.model_runner.model, count))

    def write_layers(self, path: str, tokens: int) -> None:
        """Write the states after each layer; tensor-parallel ranks have the same."""
        states = self._outputs.take(tokens)
        if self.rank == 0:
            save_file({str(index): each.contiguous() for index, each in enumerate(states)}, path)

    def return_routed_experts(self) -> None:
        """Return the experts of every token with a response, on the CPU."""
        from verl.rollout.vllm.routed_experts import connect_routed_experts

        connect_routed_experts(self.model_runner)


@dataclass
class HostInitInfo(WeightTransferInitInfo):
    """Empty: each bucket describes itself."""


@dataclass
class HostUpdateInfo(WeightTransferUpdateInfo):
    """A bucket: the file in memory that holds its bytes, and its slots as plain tuples."""

    path: str
    size: int
    slots: list[Any]


class HostTransferEngine(WeightTransferEngine[HostInitInfo, HostUpdateInfo]):
    """Maps buckets that the rollout actor wrote to memory and loads them like a checkpoint."""

    init_info_cls = HostInitInfo
    update_info_cls = HostUpdateInfo

    def init_transfer_engine(self, init_info: HostInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class calls torch.accelerator.synchronize(), which has no meaning for host memory.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: HostUpdateInfo) -> None:
        slots = [TensorSlot(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in update_info.slots]
        data = torch.from_file(update_info.path, shared=False, size=update_info.size, dtype=torch.uint8)
        self.model.load_weights(unpack(slots, data))  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_packed_embeddings(self.model)
        repack_experts(self.model)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


class IpcTransferEngine(IPCWeightTransferEngine):
    """vLLM's own receiver of CUDA memory, with handles that its messages can carry. Never run on a GPU."""

    def parse_update_info(self, update_dict: dict[str, Any]) -> IPCWeightTransferUpdateInfo:
        handles = decode_handles(update_dict["ipc_handles"])
        return super().parse_update_info(update_dict | {"ipc_handles": handles})


def refresh_packed_embeddings(model: torch.nn.Module) -> None:
    """Repack the embeddings that also serve as output heads.

    vLLM 0.32, CPU: with tied embeddings the packed copy used as `lm_head` is not refreshed by a layerwise reload, and
    log-probs are silently wrong. Remove this when a reload of a tied model passes the probe without it.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            process = getattr(module.quant_method, "process_weights_after_loading", None)
            if process is not None:
                process(module)


def repack_experts(model: torch.nn.Module) -> None:
    """Repack the experts of an MoE for their kernel.

    vLLM 0.32, CPU: experts are packed when the kernel is created, and a layerwise reload overwrites them unpacked;
    log-probs are silently wrong. Remove this when a reload of an MoE passes the probe without it.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if isinstance(experts, CPUUnquantizedExperts):
            experts.process_weights_after_loading(module)


def exit_with_parent() -> None:
    """Kill this process when its parent dies.

    vLLM's processes would wait forever for a killed parent and keep their memory; Ray kills the children of a dead
    actor unless it dies together with them. A process without a parent is left alone.
    """
    if parent := multiprocessing.parent_process():

        def wait() -> None:
            parent.join()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, name="parent", daemon=True).start()


exit_with_parent()
for transport, receiver in (("host", HostTransferEngine), ("ipc", IpcTransferEngine)):
    if BACKENDS[transport] not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKENDS[transport], receiver)
