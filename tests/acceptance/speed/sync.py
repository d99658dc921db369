"""Weight sync at the speed of vLLM's own reload: a bfloat16 model of 494M parameters to one and two engines.

Real Ray, FSDP2 (2 ranks) and vLLM on two cores. In turns: vLLM reloads buckets that are in shared memory already, then
the trainer gathers, packs and sends the same weights to one engine and to two; medians of 5. At most 1.2 times the
reload, two engines at most 1.3 times one; memory in addition to models and engines at most three. Then, without data,
the shapes of models of 7B to 72B: vLLM's own code packs them for CUDA IPC, no tensor exceeds its buffer, and handles
pass its encoder. `--short` (CI): a small model, no bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import psutil

from _common import finish, short_grpo  # isort: skip - puts tests/ on the path
import torch
from public_models import MODELS
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer
from vllm.v1.serial_utils import MsgpackEncoder

from verl.config.load import load
from verl.demo.assets import make_assets
from verl.rollout.vllm import sender
from verl.rollout.vllm.ipc_handles import encode_handles
from verl.tracking.console import Console
from verl.trainer.build.rl_builder import build_trainer
from verl.weights.bucket import SharedBucket, SharedBuffer, to_hf
from verl.weights.sync import HostTransport, Receiver

ONE, TWO, MEMORY = 1.2, 1.3, 3.0
SAMPLING_S = 0.005
HANDLE: tuple[Any, ...] = (  # what torch returns for a packed buffer on a GPU
    *(torch.Tensor, torch.Size([1 << 20]), (1,), 0, torch.storage.TypedStorage, torch.uint8, 0),
    *(b"\x01" * 64, 1 << 20, 512, False, b"\x02" * 64, 3, b"\x04" * 64, True),
)
LARGE = ("Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B", "Qwen2.5-72B")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    shape = MODELS["Qwen2.5-0.5B"] | ({"num_hidden_layers": 2, "vocab_size": 4096} if options.short else {})
    megabytes = 4 if options.short else 256
    with tempfile.TemporaryDirectory(prefix="verl-sync-") as directory:
        folder = Path(directory)
        make_assets(folder)
        model = AutoModelForCausalLM.from_config(Qwen2Config(**shape), dtype=torch.bfloat16)
        model.save_pretrained(folder / "model")
        parameters = model.num_parameters()
        del model
        settings = [
            *short_grpo(folder, prompts=2, steps=1),
            "actor_rollout_ref.rollout.dtype=bfloat16",
            f"actor_rollout_ref.rollout.update_weights_bucket_megabytes={megabytes}",
        ]
        figures = asyncio.run(measure(settings, turns=2 if options.short else 5))
    bucket = max(figures.pop("bucket_bytes"), megabytes * 2**20)
    figures["extra_buckets"] = round(figures.pop("extra_bytes") / bucket, 2)
    figures["ipc_buffers"] = {name: pack_by_ipc(name, bucket) for name in LARGE}
    bounds = (("to_one", ONE), ("two_to_one", TWO), ("extra_buckets", MEMORY))
    passed = figures["buckets"] > 1 and (options.short or all(figures[name] <= bound for name, bound in bounds))
    finish("sync", passed, parameters=parameters, bucket_mib=bucket // 2**20, **figures)


async def measure(settings: list[str], *, turns: int) -> dict[str, Any]:
    [loaded] = load(settings)
    async with build_trainer(loaded.config, Console()) as loop:
        await loop.task.begin(0)
        sync: Any = loop.task.weights
        prepared = Prepared()
        await prepared.copy_from(sync._source)
        versions = iter(range(1, 100))
        times: dict[str, list[float]] = {"reload": [], "one": [], "two": []}
        memory = MemoryWatch(sync._source.actors)
        for _ in range(turns):
            for name, source, count in (("reload", prepared, 1), ("one", sync._source, 1), ("two", sync._source, 2)):
                receivers = list(sync._receivers.active().values())[:count]
                with memory:
                    times[name].append(await send(source, receivers, next(versions)))
        await sync.sync(next(versions))  # raises unless the probe verifies every engine
    reload, one, two = (median(times[name]) for name in ("reload", "one", "two"))
    return {
        "buckets": len(prepared.buckets),
        "bucket_bytes": max(bucket.size for bucket in prepared.buckets),
        "reload_s": round(reload, 2),
        "one_engine_s": round(one, 2),
        "two_engines_s": round(two, 2),
        "to_one": round(one / reload, 2),
        "two_to_one": round(two / one, 2),
        "extra_bytes": memory.extra,
    }


async def send(source: Any, receivers: Sequence[Receiver], version: int) -> float:
    begun = time.perf_counter()
    losses = await HostTransport().send(source, receivers, version)
    assert losses == [None] * len(receivers), losses
    return time.perf_counter() - begun


class Prepared:
    """A source whose buckets are in shared memory already."""

    def __init__(self) -> None:
        self.buckets: list[SharedBucket] = []
        self._buffers: list[SharedBuffer] = []

    async def copy_from(self, source: Any) -> None:
        async for bucket in source.pack_weights():
            buffer = SharedBuffer(bucket.size)
            buffer.data[:] = bucket.data
            self._buffers.append(buffer)
            self.buckets.append(SharedBucket(bucket.slots, buffer.path, bucket.size))

    async def pack_weights(self) -> AsyncGenerator[SharedBucket, None]:
        for bucket in self.buckets:
            yield bucket


class MemoryWatch:
    """The most memory that syncs used on top of what was in use before: shared, and of the train workers."""

    def __init__(self, actors: Sequence[Any]) -> None:
        import ray

        pids = ray.get([actor.__ray_call__.remote(lambda _: psutil.Process().pid) for actor in actors])
        self._trainers = [psutil.Process(pid) for pid in pids]
        self.extra = 0

    def __enter__(self) -> None:
        self._before, self._is_over = self._used(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLING_S):
            self.extra = max(self.extra, self._used() - self._before)

    def _used(self) -> int:
        own = sum(info.rss - info.shared for info in (process.memory_info() for process in self._trainers))
        return int(psutil.virtual_memory().shared + own)


class Shapes:
    """A trained model of which only the shapes exist."""

    def __init__(self, name: str) -> None:
        with torch.device("meta"):
            config = AutoConfig.for_model(**MODELS[name])
            self._model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def weight_shapes(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        return to_hf(self._model, self._model.named_parameters())

    weights = weight_shapes


class OnMeta(TorchFunctionMode):
    """Creates tensors on the meta device that vLLM would create on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def pack_by_ipc(name: str, bucket_bytes: int) -> int:
    """Pack a model by vLLM's own code, without its data; return the number of buffers. It raises if one is too small.

    The handle of each goes through vLLM's encoder.
    """
    source = sender._Source(Shapes(name), torch.bfloat16)
    size = max(bucket_bytes, source.largest)
    encoder, buffers = MsgpackEncoder(), 0
    with OnMeta(), patch("torch.cuda.current_stream"):
        for chunk in packed_ipc_producer(iter(source), "GPU-0", lambda item: item[1], size):
            plain = {"ipc_handles": encode_handles({"GPU-0": HANDLE}), "names": chunk.names, "shapes": chunk.shapes}
            encoder.encode(WeightTransferUpdateRequest(update_info=plain))
            buffers += 1
    return buffers


if __name__ == "__main__":
    main()
