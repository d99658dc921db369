"""vLLM's `AsyncLLM` as a rollout engine."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from verl.checkpoint.adapter import adapter_config, write_adapter
from verl.errors import EngineError, ProcessLostError, WeightSyncError
from verl.rollout.shared_memory import remove_stale, shared_folder
from verl.types import Completion, SamplingParams
from verl.weights.bucket import WeightBucket, unpack

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSampling
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.output_processor import RequestOutputCollector

__all__ = ["AdapterSettings", "VllmEngine", "VllmSettings", "environment", "map_engine_errors", "stderr_tail"]

T = TypeVar("T")
ADAPTER = 1  # the number of the one adapter that an engine holds
LOOK_S = 1.0  # how often a call looks whether vLLM's process is still there


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The adapters that an engine will get, and the largest rank that it makes room for."""

    rank: int
    alpha: int
    targets: str | Sequence[str]
    max_rank: int


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What a vLLM engine is started with. `kwargs` go to vLLM's engine arguments as they are."""

    model_path: str
    dtype: str = "bfloat16"
    load_format: str = "dummy"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    tensor_parallel: int = 1
    memory_fraction: float = 0.5
    enforce_eager: bool = True
    trust_remote_code: bool = False
    weight_backend: str = "host"
    adapter: AdapterSettings | None = None  # it loads the model itself, and gets adapters instead of weights
    seed: int = 0
    device: str = "cpu"
    cpu_cache_gib: int = 1
    cpu_cores: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)


class VllmEngine:
    """A `RolloutEngine` on vLLM. One event loop owns it; it starts vLLM's own worker processes and ends them."""

    def __init__(self, settings: VllmSettings) -> None:
        self.settings = settings
        self._requests = itertools.count()
        self._alone = asyncio.Lock()
        self._adapter: LoRARequest | None = None

    async def start(self) -> None:
        remove_stale()
        os.environ.update(environment(self.settings))
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**_engine_arguments(self.settings)))
        except Exception as error:  # the cause stands on the standard error of vLLM's own process, which is also ours
            raise EngineError(f"vLLM did not start: {error}\n{stderr_tail()}") from error

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        with map_engine_errors():
            return _completion(await self._result(await self._add(token_ids, _sampling(sampling))))

    async def generate_all(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        """Enqueued under a pause and with empty caches: vLLM then cuts its batches the same way each time."""
        queues: list[RequestOutputCollector] = []
        async with self._alone:
            with map_engine_errors():
                try:
                    await self._told(self._llm.pause_generation(mode="wait", clear_cache=True))
                    for token_ids, sampling in requests:
                        queues.append(await self._add(token_ids, _sampling(sampling)))
                    await self._told(self._llm.resume_generation())
                    return [_completion(await self._result(queue)) for queue in queues]
                except asyncio.CancelledError:
                    await self._llm.abort([queue.request_id for queue in queues], internal=True)
                    await self._llm.resume_generation()
                    raise

    async def compute_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        from vllm import SamplingParams as VllmSampling
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.FINAL_ONLY
        params = VllmSampling(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=kind)
        with map_engine_errors():
            entries = (await self._result(await self._add(token_ids, params))).prompt_logprobs
        return [entry[token].logprob for token, entry in zip(token_ids[1:], entries[1:], strict=True)]

    async def load_weights(self, buckets: Sequence[WeightBucket], version: int) -> None:
        load = self._load_weights if self.settings.adapter is None else self._load_adapter
        await self._told(load(buckets, version))

    async def _load_weights(self, buckets: Sequence[WeightBucket], version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.pause_generation(mode="keep", clear_cache=True)
        await self._llm.start_weight_update()
        for bucket in buckets:
            # vLLM's worker, a child process, cannot see the object store: what crosses is a name in shared memory.
            with shared_folder() as folder:
                file = folder / "parcel"
                bucket.data.tofile(file)
                slots = [(slot.name, slot.dtype, list(slot.shape), slot.offset) for slot in bucket.slots]
                info = {"path": str(file), "size": bucket.data.nbytes, "slots": slots}
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        await self._llm.finish_weight_update(str(version))
        await self._llm.resume_generation()

    async def _load_adapter(self, buckets: Sequence[WeightBucket], version: int) -> None:
        """Put an adapter in the place of the one before, also for answers that are on their way."""
        import torch
        from vllm.exceptions import VLLMServerError
        from vllm.lora.request import LoRARequest

        adapter = self.settings.adapter
        assert adapter is not None
        tensors = {n: t for p in buckets for n, t in unpack(p.slots, torch.from_numpy(p.data.copy()))}
        if wrong := [name for name in tensors if ".lora_" not in name]:
            raise WeightSyncError(f"an engine that takes adapters alone was sent {wrong[0]} and {len(wrong) - 1} more")
        config = adapter_config(
            base=self.settings.model_path, rank=adapter.rank, alpha=adapter.alpha, targets=adapter.targets
        )
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        with shared_folder() as folder:
            write_adapter(folder, config, tensors)
            try:
                await self._llm.add_lora(LoRARequest(f"version {version}", ADAPTER, str(folder), load_inplace=True))
            except VLLMServerError:  # its process has died
                raise
            except Exception as error:  # whatever went wrong in its process
                raise EngineError(
                    f"vLLM does not take the adapter: {error}; set actor_rollout_ref.rollout.lora_transport=merged to "
                    "send it all weights instead"
                ) from error
            # Of the same number: it is there, and is not looked for in the folder any more.
            self._adapter = LoRARequest(f"version {version}", ADAPTER, str(folder))
        await self._llm.update_weight_version(str(version))
        await self._llm.resume_generation()

    async def version(self) -> int:
        return _number(await self._told(self._llm.get_weight_version()))

    async def close(self) -> None:
        if hasattr(self, "_llm"):
            self._llm.shutdown()
            del self._llm  # now: at the interpreter's end its finaliser would find half of its modules gone

    # Below: vLLM's own weight-transfer control plane, driven by its trainer-side NCCL and IPC engines.

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._told(self._llm.init_weight_transfer_engine(request))

    async def start_weight_update(self) -> None:
        await self._told(self._llm.pause_generation(mode="keep", clear_cache=True))
        await self._told(self._llm.start_weight_update())

    async def update_weights(self, request: Any) -> None:
        await self._told(self._llm.update_weights(request))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self._told(self._llm.finish_weight_update(weight_version))
        await self._told(self._llm.resume_generation())

    async def _told(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives; an error if vLLM's process is gone, also in the midst of it: vLLM would wait for ever."""
        working = asyncio.ensure_future(work)
        try:
            with map_engine_errors():
                while not working.done():
                    await self._llm.check_health()
                    await asyncio.wait([working], timeout=LOOK_S)
                return working.result()
        finally:
            working.cancel()  # of no effect on what is done

    async def _add(self, token_ids: Sequence[int], params: Any) -> RequestOutputCollector:
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(prompt_token_ids=list(token_ids))
        return await self._llm.add_request(str(next(self._requests)), prompt, params, lora_request=self._adapter)

    async def _result(self, queue: RequestOutputCollector) -> Any:
        """The one output of a request that gives its last only; one that nobody waits for any more is aborted."""
        try:
            return await queue.get()
        except asyncio.CancelledError:
            await self._llm.abort(queue.request_id, internal=True)
            raise
        finally:
            queue.close()


@contextmanager
def map_engine_errors() -> Iterator[None]:
    """An engine process that has died is a process that was lost."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise ProcessLostError(f"vLLM's engine process has died: {error}") from error


def _sampling(sampling: SamplingParams) -> VllmSampling:
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind

    return VllmSampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(final: Any) -> Completion:
    output = final.outputs[0]
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended a request with {output.finish_reason!r} instead of 'stop' or 'length'")
    tokens = list(output.token_ids)
    spans = output.weight_versions or []
    versions = [_number(span.version) for span in spans for _ in range(span.start, span.end)]
    if len(versions) != len(tokens):
        raise EngineError(f"vLLM named the weights of {len(versions)} out of {len(tokens)} tokens")
    logprobs = [entry[token].logprob for token, entry in zip(tokens, output.logprobs, strict=True)]
    return Completion(tokens, logprobs, versions, output.finish_reason)


def _engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    from verl.rollout.vllm.transfer import BACKEND, EXTENSION

    host = settings.weight_backend == "host"
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "load_format": settings.load_format,
        "max_num_seqs": settings.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel,
        "enforce_eager": settings.enforce_eager,
        "trust_remote_code": settings.trust_remote_code,
        "seed": settings.seed,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution that the token was really drawn from
        "weight_transfer_config": {"backend": BACKEND if host else settings.weight_backend},
        "worker_extension_cls": EXTENSION,
    }
    if settings.adapter is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": settings.adapter.max_rank}
    if settings.device != "cpu":
        arguments["gpu_memory_utilization"] = settings.memory_fraction
    if settings.max_model_len is not None:
        arguments["max_model_len"] = settings.max_model_len
    if settings.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = settings.max_num_batched_tokens
    return arguments | settings.kwargs


def environment(settings: VllmSettings) -> dict[str, str]:
    """Variables that vLLM reads at import; what the user has set stays as it is."""
    wanted = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if settings.device == "cpu":
        wanted["VLLM_CPU_KVCACHE_SPACE"] = str(settings.cpu_cache_gib)
        # AsyncLLM has its engine process either way; this keeps the model in it, instead of in a third process that
        # would import vLLM once more.
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if settings.tensor_parallel == 1 else "1"
        if settings.cpu_cores:
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = settings.cpu_cores
        if settings.enforce_eager:
            wanted["TORCH_COMPILE_DISABLE"] = "1"  # spares a compile of up to 50 s at the first request
    return {name: value for name, value in wanted.items() if name not in os.environ}


def stderr_tail(lines: int = 30) -> str:
    """The end of this process's standard error, where it goes to a file, as it does in a Ray worker."""
    file = Path(os.path.realpath("/proc/self/fd/2"))
    if not file.is_file():
        return "see the messages above"
    tail = file.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"the end of {file}:", *(f"  | {line}" for line in tail)])


def _number(version: str) -> int:
    return int(version) if version.lstrip("-").isdigit() else -1
