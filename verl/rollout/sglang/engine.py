"""SGLang's `Engine` as a rollout engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.errors import EngineError, WeightSyncError
from verl.private_files import get_user_folder
from verl.process_output import tail_stderr
from verl.rollout.sglang.settings import WEIGHT_LOADER, SglangSettings
from verl.rollout.sglang.weight_loader import write_bucket
from verl.types import Completion, SamplingParams, hash_seed
from verl.weights.bucket import SharedBucket, WeightBucket, share

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput

FIRST = 1  # a priority; that of other requests is lower
MEMORY = ("weights", "kv_cache", "cuda_graph")
"""SGLang's names of what an engine that sleeps has released."""
POLL_S = 0.001


class SglangEngine:
    """A `RolloutEngine` on SGLang, the only one of its process; one event loop owns it.

    SGLang takes the signals of the process, ends all its child processes when it closes, and ends the process itself
    when one of them dies.
    """

    def __init__(self, settings: SglangSettings) -> None:
        self.settings = settings
        self._ids = itertools.count()
        self._asleep: set[str] = set()
        self._is_updating = self._may_resume = False

    async def start(self) -> None:
        os.environ.update(self.settings.make_environment())
        self._folder = tempfile.TemporaryDirectory(dir=get_user_folder(), prefix="sglang-", ignore_cleanup_errors=True)
        tempfile.tempdir = self._folder.name  # anyone who can open SGLang's sockets can send them pickles
        self._errors = Path(self._folder.name, "errors")
        self._errors.mkdir()
        from sglang.srt.entrypoints.engine import Engine

        try:
            arguments = self.settings.make_arguments(_count_cache_tokens(self.settings))
            self._engine = Engine(**arguments)
        except Exception as error:  # the cause is on stderr, which SGLang's processes share with this one
            self._folder.cleanup()
            raise EngineError(
                f"SGLang cannot start with {self.settings.model_path}: {error}\n{tail_stderr()}"
            ) from error
        self._manager = self._engine.tokenizer_manager

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        [output] = await self._run([self._make_request(token_ids, sampling)])
        return read_completion(output, sampling)

    async def generate_all(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        """Continue all requests. SGLang schedules them as they arrive, and repeats no results to the bit."""
        outputs = await self._run([self._make_request(*request) for request in requests])
        return [read_completion(output, sampling) for output, (_, sampling) in zip(outputs, requests, strict=True)]

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """After a weight update nothing runs yet, and the probe does not queue behind a full engine."""
        one = SamplingParams(max_tokens=1, temperature=0.0)
        requests = [self._make_request(each, one, logprob_start_len=0, priority=FIRST) for each in sequences]
        outputs = await self._run(requests)
        return [
            read_logprobs(output["meta_info"]["input_token_logprobs"][1:], each[1:]).tolist()
            for output, each in zip(outputs, sequences, strict=True)
        ]

    async def start_weight_update(self) -> None:
        """Let no request run, and have memory for the weights. What an unfinished update has loaded is replaced."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        await self._pause()
        await self._wake("weights")
        if not self._is_updating:
            _check("begin a weight update", *await self._manager.begin_weight_update(BeginWeightUpdateReqInput()))
            self._is_updating = True

    async def load_bucket(self, bucket: WeightBucket | SharedBucket) -> None:
        """Load a bucket. SGLang's processes cannot see the object store: they get the path of a file in memory."""
        with share(bucket) as shared:
            await self._send(write_bucket(shared))

    async def finish_weight_update(self, version: int) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput, UpdateWeightVersionReqInput

        # Streams of random numbers neither start again after a restart or resume, nor repeat on another engine.
        await self._send({"seed": hash_seed(self.settings.seed, version)})
        _check("finish a weight update", *await self._manager.end_weight_update(EndWeightUpdateReqInput()))
        self._is_updating = False
        await self._wake(*MEMORY[1:])
        _check("drop the cache of old weights", (await self._manager.flush_cache()).success, "requests still run")
        await self._manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        )
        self._may_resume = True

    async def sleep(self) -> None:
        """Free the weights and the cache. Nothing is freed on the CPU."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._pause()
        if awake := [name for name in MEMORY if name not in self._asleep]:  # what is released twice ends the process
            await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=awake))
            self._asleep.update(awake)

    async def version(self) -> int:
        """Ask the scheduler process, so that the reply shows that it lives."""
        [state] = await self._manager.get_internal_state()
        return _parse_version(state["weight_version"])

    async def close(self) -> None:
        if hasattr(self, "_engine"):
            for task in self._manager.asyncio_tasks:
                task.cancel()
            self._engine.shutdown()
            self._folder.cleanup()  # SGLang leaves its sockets there
            del self._engine

    def _make_request(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, logprob_start_len: int = -1, **options: Any
    ) -> GenerateReqInput:
        from sglang.srt.managers.io_struct import GenerateReqInput

        return GenerateReqInput(
            rid=f"{next(self._ids)}/",  # SGLang aborts all requests whose names begin with the given one
            input_ids=list(token_ids),
            sampling_params={
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "stop_token_ids": list(sampling.stop_token_ids),
            },
            return_logprob=True,
            logprob_start_len=logprob_start_len,
            **options,
        )

    async def _run(self, requests: Sequence[GenerateReqInput]) -> list[dict[str, Any]]:
        """Return the outputs of requests; abort them if the caller is canceled."""
        answers = [asyncio.ensure_future(self._answer(request)) for request in requests]
        try:
            await self._resume([request.rid for request in requests], answers)
            return await asyncio.gather(*answers)
        finally:
            for answer in answers:
                answer.cancel()  # no effect once it is done; else SGLang aborts its request

    async def _answer(self, request: GenerateReqInput) -> dict[str, Any]:
        try:
            [output] = [output async for output in self._manager.generate_request(request)]
        except Exception as error:  # process boundary
            raise EngineError(f"SGLang refused a request: {error}") from error
        return output

    async def _pause(self) -> None:
        """Let no request run, and keep no cache of theirs: they start with their tokens so far when they go on."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._may_resume = False
        await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))

    async def _resume(self, ids: Sequence[str], answers: Sequence[asyncio.Future[Any]]) -> None:
        """Let requests run that a weight update has paused, once the scheduler has those with `ids`.

        SGLang holds new requests back in this process until it continues, and a probe would come too late.
        """
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        if not self._may_resume:
            return
        async with self._manager.is_pause_cond:
            self._manager.is_pause = False
            self._manager.is_pause_cond.notify_all()
        while self._may_resume and not all(map(self._is_sent, ids, answers)):
            await asyncio.sleep(POLL_S)
        if self._may_resume:  # else another request has resumed, or an update has paused again
            self._may_resume = False
            is_cpu = self.settings.device == "cpu"
            await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=not is_cpu))

    def _is_sent(self, id: str, answer: asyncio.Future[Any]) -> bool:
        state = self._manager.rid_to_state.get(id)
        return answer.done() or (state is not None and state.dispatched)

    async def _wake(self, *memory: str) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if released := [name for name in memory if name in self._asleep]:
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=released))
            self._asleep.difference_update(released)

    async def _send(self, message: dict[str, Any]) -> None:
        """Pass a message to `load_message` in every scheduler process; raise what it could not do."""
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        text = json.dumps(message | {"errors": str(self._errors)})
        payload = MultiprocessingSerializer.serialize([(text, torch.empty(0))])
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * self.settings.tensor_parallel_size,
            load_format=WEIGHT_LOADER,
            flush_cache=False,  # once at the end
        )
        _check("load weights", *await self._manager.update_weights_from_tensor(request))
        files = list(self._errors.iterdir())
        reasons = [file.read_text() for file in files]
        for file in files:
            file.unlink()  # or the next message would seem to have failed
        if reasons:
            raise WeightSyncError(f"SGLang cannot load the weights: {'; '.join(dict.fromkeys(reasons))}")


def _check(action: str, has_succeeded: bool, message: str) -> None:
    """Raise what SGLang returns instead of raising it."""
    if not has_succeeded:
        raise WeightSyncError(f"SGLang could not {action}: {message}")


def read_completion(output: dict[str, Any], sampling: SamplingParams) -> Completion:
    """Return what SGLang generated, or raise if it is not what was asked for."""
    info, tokens = output["meta_info"], list(output["output_ids"])
    reason = info["finish_reason"]["type"]
    if reason not in ("stop", "length"):
        raise EngineError(f"SGLang ended a request with {info['finish_reason']} instead of 'stop' or 'length'")
    if reason == "length" and len(tokens) != sampling.max_tokens:
        raise EngineError(
            f"SGLang ended a response after {len(tokens)} of {sampling.max_tokens} tokens; increase "
            "actor_rollout_ref.rollout.max_model_len, or the memory of the engine's cache"
        )
    versions = [
        _parse_version(span["version"]) for span in info["weight_versions"] for _ in range(span["start"], span["end"])
    ]
    if len(versions) != len(tokens):
        raise EngineError(f"SGLang reported weight versions for {len(versions)} of {len(tokens)} tokens")
    logprobs = read_logprobs(info["output_token_logprobs"], tokens)
    updates = len(info["weight_versions"]) - 1  # each of them has retracted the request, too
    preemptions = max(0, info["num_retractions"] - updates)
    return Completion(tokens, logprobs, np.array(versions, np.int32), reason, preemptions=preemptions)


def read_logprobs(entries: Sequence[tuple[float, int, Any]], tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the log-probs of `tokens` from SGLang's (log-prob, token, text)."""
    if [entry[1] for entry in entries] != list(tokens):
        raise EngineError(f"SGLang returned log-probs of {len(entries)} other tokens than the {len(tokens)} requested")
    return np.array([entry[0] for entry in entries], np.float32)


def _count_cache_tokens(settings: SglangSettings) -> int | None:
    """Return how many tokens the key-value cache of one process holds; None on accelerators."""
    import torch
    from transformers import AutoConfig

    if settings.device != "cpu":
        return None
    config = AutoConfig.from_pretrained(
        settings.model_path, trust_remote_code=settings.trust_remote_code
    ).get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = max(1, config.num_key_value_heads // settings.tensor_parallel_size)
    token_bytes = 2 * config.num_hidden_layers * heads * head * getattr(torch, settings.dtype).itemsize
    return settings.cpu_cache_gib * 2**30 // int(token_bytes)


def _parse_version(version: str) -> int:
    return int(version) if version.lstrip("-").isdigit() else -1
