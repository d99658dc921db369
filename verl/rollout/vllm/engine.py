"""vLLM's `AsyncLLM` as a rollout engine."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from verl.checkpoint.adapter import adapter_config, write_adapter
from verl.errors import EngineError, ProcessLostError, WeightSyncError
from verl.private_files import get_user_folder
from verl.process_output import tail_stderr
from verl.rollout.vllm.settings import AdapterSettings, VllmSettings
from verl.types import Completion, SamplingParams, hash_seed
from verl.weights.bucket import SharedBucket, WeightBucket, share, unpack

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor
    from vllm import SamplingParams as VllmSampling
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

T = TypeVar("T")
ADAPTER_ID = 1  # an engine holds one adapter
FIRST = -1  # a priority; that of other requests is 0
HEALTH_CHECK_S = 1.0  # between checks of vLLM's process during a call


CPU_BATCHED_TOKENS = 2048  # vLLM's default
ENGINE_ARGUMENTS = (
    *("dtype", "quantization", "load_format", "max_model_len", "max_num_batched_tokens"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "trust_remote_code", "seed"),
)


class VllmEngine:
    """A `RolloutEngine` on vLLM. One event loop owns it; it starts and ends vLLM's worker processes."""

    def __init__(self, settings: VllmSettings) -> None:
        self.settings = settings
        self._requests = itertools.count()
        self._batch_lock = asyncio.Lock()
        self._adapter: LoRARequest | None = None
        self._adapter_tensors: dict[str, Tensor] = {}  # an adapter that is being received
        self._is_asleep = self._is_updating = self._may_resume = False
        self._pauses = 0  # that preempt what runs

    async def start(self) -> None:
        self._llm = await start_vllm(self.settings, _engine_arguments(self.settings))
        if self.settings.routed_experts and self.settings.device == "cpu":
            await self._call(self._llm.collective_rpc("return_routed_experts"))
        await self._call(self._llm.get_supported_tasks())  # cached; the first request would wait for a dead process

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        pauses, may_resume = self._pauses, self._may_resume
        with map_engine_errors():
            queue = await self._add(token_ids, _sampling(sampling))
            if may_resume and self._pauses == pauses:  # after an update meanwhile, the probe is to run first
                await self._resume()
        try:
            with map_engine_errors():
                completion = self._completion(await self._result(queue), sampling)
        except ProcessLostError as error:
            error.partial = self._read_partial(queue, sampling)
            raise
        preempted = completion.preemptions - (self._pauses - pauses)  # vLLM counts those for new weights, too
        return replace(completion, preemptions=max(0, preempted))

    async def generate_all(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        """Enqueue under a pause and with empty caches: vLLM then schedules the same batches each time."""
        queues: list[RequestOutputCollector] = []
        async with self._batch_lock:
            with map_engine_errors():
                try:
                    await self._resume()
                    await self._call(self._llm.pause_generation(mode="wait", clear_cache=True))
                    for token_ids, sampling in requests:
                        queues.append(await self._add(token_ids, _sampling(sampling)))
                    await self._call(self._llm.resume_generation())
                    return [
                        self._completion(await self._result(queue), sampling)
                        for queue, (_, sampling) in zip(queues, requests, strict=True)
                    ]
                except asyncio.CancelledError:
                    await self._llm.abort([queue.request_id for queue in queues], internal=True)
                    await self._llm.resume_generation()
                    raise

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """After a weight update nothing runs yet, and the probe does not queue behind a full engine."""
        params = _sampling(SamplingParams(max_tokens=1, temperature=0.0), prompt_logprobs=0)
        with map_engine_errors():
            queues = [await self._add(each, params, priority=FIRST) for each in sequences]
            await self._resume()
            outputs = await asyncio.gather(*(self._result(queue) for queue in queues))
        return [
            read_logprobs(output.prompt_logprobs, each[1:]).tolist()
            for output, each in zip(outputs, sequences, strict=True)
        ]

    async def compute_hidden_states(self, token_ids: Sequence[int]) -> list[Tensor]:
        """Layers are only seen with `enforce_eager`: compiled ones and CUDA graphs run without hooks."""
        from safetensors.torch import load_file

        with tempfile.TemporaryDirectory(prefix="verl-layers-") as folder:
            await self._call(self._llm.collective_rpc("record_layers"))
            await self.compute_logprobs([token_ids])
            path = str(Path(folder, "layers.safetensors"))
            await self._call(self._llm.collective_rpc("write_layers", args=(path, len(token_ids))))
            states = load_file(path)
        return [states[str(index)] for index in range(len(states))]

    async def start_weight_update(self) -> None:
        await self._call(self._start_weight_update())

    async def _start_weight_update(self) -> None:
        """Let no request run, and have memory for the weights; not yet for the cache: the trainer may be sending."""
        self._may_resume = False
        if self._is_asleep:
            await self._llm.wake_up(["weights"])
        else:
            await self._pause()
        self._adapter_tensors.clear()
        if self.settings.adapter is None:
            if self._is_updating:  # vLLM would take the old weights of a layer for a part of the new ones
                await self._llm.finish_weight_update("-1")
            await self._llm.start_weight_update()
        self._is_updating = True

    async def load_bucket(self, bucket: WeightBucket | SharedBucket) -> None:
        """Load a bucket. vLLM's workers cannot see the object store: they get the path of a file in memory."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self.settings.adapter is not None:
            return self._collect_adapter(bucket)
        with share(bucket) as shared:
            slots = [(slot.name, slot.dtype, list(slot.shape), slot.offset) for slot in shared.slots]
            info = {"path": shared.path, "size": shared.size, "slots": slots}
            await self._call(self._llm.update_weights(WeightTransferUpdateRequest(update_info=info)))

    async def finish_weight_update(self, version: int) -> None:
        await self._call(self._finish_weight_update(version))

    async def _finish_weight_update(self, version: int) -> None:
        if self.settings.adapter is None:
            await self._llm.finish_weight_update(str(version))
        else:
            await self._load_adapter(self.settings.adapter, version)
        self._is_updating = False
        if self._is_asleep:
            await self._llm.wake_up(["kv_cache"])
            self._is_asleep = False
            await self._pause()  # awake, vLLM resumes by itself
        # Streams of random numbers neither start again after a restart or resume, nor repeat on another engine.
        await self._llm.collective_rpc("seed_sampling", args=(hash_seed(self.settings.seed, version),))
        self._may_resume = True

    async def _pause(self) -> None:
        """Preempt what runs. It continues by `_resume`, with nothing in its cache that is of older weights."""
        self._pauses += 1
        await self._llm.pause_generation(mode="keep", clear_cache=True)

    async def _resume(self) -> None:
        """Let requests run that a weight update has paused."""
        if self._may_resume:
            self._may_resume = False
            await self._call(self._llm.resume_generation())

    def _collect_adapter(self, bucket: WeightBucket | SharedBucket) -> None:
        import torch

        tensors = dict(unpack(bucket.slots, torch.from_numpy(bucket.data.copy())))
        if wrong := [name for name in tensors if ".lora_" not in name]:
            raise WeightSyncError(f"an engine that only loads adapters was sent {wrong[0]} and {len(wrong) - 1} more")
        self._adapter_tensors |= tensors

    async def _load_adapter(self, adapter: AdapterSettings, version: int) -> None:
        """Replace the adapter, also for running requests."""
        from vllm.exceptions import VLLMServerError
        from vllm.lora.request import LoRARequest

        config = adapter_config(
            base=self.settings.model_path, rank=adapter.rank, alpha=adapter.alpha, targets=adapter.targets
        )
        with tempfile.TemporaryDirectory(prefix="verl-adapter-") as folder:
            write_adapter(Path(folder), config, self._adapter_tensors)
            try:
                await self._llm.add_lora(LoRARequest(f"version {version}", ADAPTER_ID, folder, load_inplace=True))
            except VLLMServerError:  # its process has died; see `map_engine_errors`
                raise
            except Exception as error:  # process boundary
                raise EngineError(
                    f"vLLM cannot load the adapter: {error}. Set actor_rollout_ref.rollout.lora_transport=merged to "
                    "send merged weights instead."
                ) from error
            # vLLM holds this id now, and does not look into the folder again.
            self._adapter = LoRARequest(f"version {version}", ADAPTER_ID, folder)
        await self._llm.update_weight_version(str(version))

    async def sleep(self) -> None:
        """Free the weights and the cache. With an adapter the weights go to host memory: they are not sent again."""
        self._may_resume = False
        self._pauses += 1
        await self._call(self._llm.sleep(level=2 if self.settings.adapter is None else 1, mode="keep"))
        self._is_asleep = True

    async def version(self) -> int:
        return _parse_version(await self._call(self._llm.get_weight_version()))

    async def close(self) -> None:
        if hasattr(self, "_llm"):
            self._llm.shutdown()
            del self._llm  # now: at interpreter exit its finalizer would find modules gone

    # driven by vLLM's trainer-side NCCL and IPC engines, together with the start and the end of an update

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._call(self._llm.init_weight_transfer_engine(request))

    async def update_weights(self, request: Any) -> None:
        await self._call(self._llm.update_weights(request))

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`; raise if vLLM's process dies meanwhile, for which vLLM would wait forever."""
        working = asyncio.ensure_future(work)
        try:
            with map_engine_errors():
                while not working.done():
                    await self._llm.check_health()
                    await asyncio.wait([working], timeout=HEALTH_CHECK_S)
                return working.result()
        finally:
            working.cancel()  # no effect once it is done

    async def _add(self, token_ids: Sequence[int], params: Any, priority: int = 0) -> RequestOutputCollector:
        from vllm.inputs import TokensPrompt

        if params.logprobs:  # vLLM's process ends with an error if there are fewer tokens
            params.logprobs = min(params.logprobs, self._llm.model_config.get_vocab_size())
        prompt = TokensPrompt(prompt_token_ids=list(token_ids))
        name = str(next(self._requests))
        return await self._llm.add_request(name, prompt, params, lora_request=self._adapter, priority=priority)

    def _completion(self, final: Any, sampling: SamplingParams) -> Completion:
        if (reason := final.outputs[0].finish_reason) not in ("stop", "length"):
            raise EngineError(f"vLLM ended a request with {reason!r} instead of 'stop' or 'length'")
        completion = _completion(final, keep_sampling_mask=sampling.keep_sampling_mask)
        if self.settings.routed_experts:  # without them, the trainer would use its own unnoticed
            inputs = len(final.prompt_token_ids) + len(completion.token_ids) - 1
            rows = 0 if completion.routed_experts is None else len(completion.routed_experts)
            if rows < inputs:
                raise EngineError(f"vLLM returned the experts of {rows} tokens instead of {inputs}")
        return completion

    def _read_partial(self, queue: RequestOutputCollector, sampling: SamplingParams) -> Completion | None:
        """Return what a request had generated when vLLM's process died; None if another engine cannot continue it."""
        from vllm.v1.engine import FinishReason

        state = self._llm.output_processor.request_states.get(queue.request_id)
        if state is None or sampling.seed is not None or self.settings.routed_experts:
            return None
        output = state.make_request_output([], None, FinishReason.ABORT, None)
        return _completion(output, keep_sampling_mask=sampling.keep_sampling_mask)

    async def _result(self, queue: RequestOutputCollector) -> Any:
        """Return the output of a request that yields only its last one; abort it if the caller is cancelled."""
        try:
            return await queue.get()
        except asyncio.CancelledError:
            await self._llm.abort(queue.request_id, internal=True)
            raise
        finally:
            queue.close()


@contextmanager
def map_engine_errors() -> Iterator[None]:
    """Raise the death of vLLM's engine process as `ProcessLostError`."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise ProcessLostError(
            f"vLLM's engine process has died: {find_engine_error(tail_stderr(200)) or error}"
        ) from error


def find_engine_error(output: str) -> str:
    """Return the exception that ended vLLM's engine process, from what it has printed; empty if it printed none."""
    found = re.findall(r"\(EngineCore[^)]*\) ERROR .*?\] ((?:\w+\.)*\w*(?:Error|Exception): .*)", output)
    return found[-1].strip() if found else ""


def _sampling(sampling: SamplingParams, *, prompt_logprobs: int | None = None) -> VllmSampling:
    from vllm import SamplingParams as VllmSampling
    from vllm.sampling_params import RequestOutputKind

    return VllmSampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=sampling.top_k if sampling.keep_sampling_mask else 0,
        prompt_logprobs=prompt_logprobs,
        flat_logprobs=True,  # lists of numbers instead of an object for every token
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(final: Any, *, keep_sampling_mask: bool = False) -> Completion:
    output = final.outputs[0]
    tokens = list(output.token_ids)
    spans = output.weight_versions or []
    numbers = np.array([_parse_version(span.version) for span in spans], np.int32)
    versions = np.repeat(numbers, [span.end - span.start for span in spans] or 0)
    if len(versions) != len(tokens):
        raise EngineError(f"vLLM reported weight versions for {len(versions)} of {len(tokens)} tokens")
    kept = None
    if keep_sampling_mask and tokens:
        logprobs, kept = read_kept(output.logprobs, tokens)
    else:
        logprobs = read_logprobs(output.logprobs, tokens)
    return Completion(
        tokens,
        logprobs,
        versions,
        output.finish_reason,
        output.routed_experts,
        kept_ids=kept,
        preemptions=0 if final.metrics is None else final.metrics.num_preemptions,
    )


def read_logprobs(flat: FlatLogprobs, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the log-probs of `tokens`. vLLM was asked for no others; the first token of a prompt has none."""
    if flat.token_ids != list(tokens):
        raise EngineError(
            f"vLLM returned log-probs of {len(flat.token_ids)} tokens instead of the {len(tokens)} requested ones"
        )
    return np.array(flat.logprobs, np.float32)


def read_kept(flat: FlatLogprobs, tokens: Sequence[int]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Return the log-probs of `tokens`, and the `kept_ids` over which they are normalized.

    vLLM returns each token and the `top_k` most likely ones; the log-probs of those that `top_p` has dropped are -inf.
    It also samples from tokens beyond `top_k` that are as likely as the last of them, and does not return those.
    """
    width = len(flat.token_ids) // len(tokens)
    if width < 2 or flat.token_ids[::width] != list(tokens):
        raise EngineError(
            f"vLLM returned {len(flat.token_ids)} log-probs, not as many for each of {len(tokens)} tokens"
        )
    ids = np.array(flat.token_ids, np.int32).reshape(-1, width)
    logprobs = np.array(flat.logprobs, np.float32).reshape(-1, width)
    is_kept = np.isfinite(logprobs)
    ids = np.where(is_kept, ids, ids[:, :1])
    is_kept[:, 1:] &= ids[:, 1:] != ids[:, :1]  # count the token once
    normalizer = np.log(np.where(is_kept, np.exp(logprobs), 0.0).sum(-1))
    return logprobs[:, 0] - normalizer, ids


async def start_vllm(settings: VllmSettings, arguments: dict[str, Any]) -> AsyncLLM:
    """Start vLLM with the engine arguments that rollout engines and reward models share, `arguments` and `kwargs`."""
    os.environ.update(environment(settings))
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from verl.rollout.vllm.transfer import EXTENSION

    # vLLM chooses its batch sizes by this: LLM_CLASS is for throughput, by device; the other is small and fixed.
    context = UsageContext.ENGINE_CONTEXT if settings.device == "cpu" else UsageContext.LLM_CLASS
    common: dict[str, Any] = {
        "model": settings.model_path,
        "enforce_eager": settings.is_eager,
        "max_num_seqs": settings.max_sequences,
        "worker_extension_cls": EXTENSION,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        **{name: getattr(settings, name) for name in ENGINE_ARGUMENTS},
    }
    if settings.device != "cpu":
        common["gpu_memory_utilization"] = settings.gpu_memory_utilization
    if settings.processes > 1:
        common["distributed_executor_backend"] = "mp"  # inside a placement group vLLM would choose Ray
    try:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**common | arguments | settings.kwargs), usage_context=context)
        if settings.processes > 1:
            await llm.collective_rpc("unlink_shared_memory")
        return llm
    except Exception as error:  # the cause is on stderr, which vLLM's process shares with this one
        raise EngineError(f"vLLM cannot start with {settings.model_path}: {error}\n{tail_stderr()}") from error


def _engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    from verl.rollout.vllm.transfer import BACKENDS

    arguments: dict[str, Any] = {
        "scheduling_policy": "priority",
        "disable_log_stats": False,  # for the preemptions of each request, and for Prometheus
        "logprobs_mode": "processed_logprobs",  # log-probs of the distribution that the token was drawn from
        "weight_transfer_config": {"backend": BACKENDS[settings.weight_backend]},
    }
    if settings.device == "cpu" and settings.max_model_len is not None:
        # A prompt must not be split: vLLM draws a token after each part, and cannot rewind the RNG of the CPU.
        batch = settings.max_num_batched_tokens or max(CPU_BATCHED_TOKENS, settings.max_model_len)
        splits = batch < settings.max_model_len
        arguments |= {"max_num_batched_tokens": batch, "enable_chunked_prefill": splits}
    if settings.expert_parallel:
        arguments["enable_expert_parallel"] = True
    if settings.adapter is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": settings.adapter.max_rank}
    if settings.sleeps and settings.device != "cpu":  # vLLM's CPU worker takes the calls, and frees nothing
        arguments["enable_sleep_mode"] = True
    if settings.max_logprobs is not None:
        arguments["max_logprobs"] = settings.max_logprobs
    if settings.fp32_lm_head:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if settings.routed_experts and settings.device == "cpu":
        arguments |= {
            "enable_prefix_caching": True,
            "scheduler_cls": "verl.rollout.vllm.routed_experts.RoutingScheduler",
        }
    elif settings.routed_experts:
        arguments["enable_return_routed_experts"] = True
    return arguments


def environment(settings: VllmSettings) -> dict[str, str]:
    """Return variables that vLLM reads at import: wanted ones unless the user has set them, and necessary ones."""
    private = str(get_user_folder())
    wanted = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    wanted["VLLM_RPC_BASE_PATH"] = private  # anyone who can open vLLM's sockets can send them pickles
    if settings.device == "cpu":
        wanted["VLLM_CPU_KVCACHE_SPACE"] = str(settings.cpu_cache_gib)
        # AsyncLLM has an engine process either way; this keeps the model in it instead of in a third process.
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if settings.processes == 1 else "1"
        if settings.cpu_cores:
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = settings.cpu_cores
        if settings.is_eager:
            wanted["TORCH_COMPILE_DISABLE"] = "1"  # saves a compile of up to 50 s at the first request
    unset = {name: value for name, value in wanted.items() if name not in os.environ}
    forced = {"VLLM_BATCH_INVARIANT": "1"} if settings.batch_invariant else {}
    return unset | forced | {"TMPDIR": private}  # its engine process writes a file there that everyone could read


def _parse_version(version: str) -> int:
    return int(version) if version.lstrip("-").isdigit() else -1
