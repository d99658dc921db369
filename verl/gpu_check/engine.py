"""One rollout engine and one trainer: sleep and wake, new weights, and a probe that notices wrong ones."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.config.load import load
from verl.config.rollout_engines import get_rollout_engine
from verl.config.schema import Config
from verl.errors import VerlError, list_some
from verl.gpu_check.stage import Checks, Context
from verl.memory_plan.accelerators import GIB
from verl.rollout.engine import RolloutEngine, load_weights, make_engine
from verl.rollout.settings import RolloutEngineSettings
from verl.trainer.build.worker_settings import coarsest_dtype, engine_settings, train_settings
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.policy.trainer import PolicyTrainer
from verl.training.process_group import close_process_group, init_process_group
from verl.types import Completion, SamplingParams
from verl.weights.bucket import WeightBucket, pack, unpack
from verl.weights.probe import TOLERANCES, Probe, compare_logprobs

REQUESTS, PROMPT, RESPONSE = 4, 8, 256
CHANGE = 0.5
"""Standard deviation of the factor by which each weight changes: engines with the old ones, in whole or in part, have
to be far from those with the new ones."""
UTILIZATION = 0.3
SLEEPING_S = 1.0


def check_engine(context: Context, checks: Checks) -> None:
    """Check that an engine has the trainer's weights, also after sleep, and that the probe finds it if it has not."""
    config = _load_config(context)
    torch.manual_seed(0)
    asyncio.run(_check(config, context, checks))


def _load_config(context: Context) -> Config:
    rollout = "actor_rollout_ref.rollout"
    settings = [
        f"actor_rollout_ref.model.path={context.get_model()}",
        f"trainer.device={context.device}",
        "trainer.n_gpus_per_node=1",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={RESPONSE}",
        f"{rollout}.name={context.engine}",
        f"{rollout}.free_cache_engine=True",
        f"{rollout}.load_format=auto",  # the weights that trainer and engine begin with are the same
        *([f"{rollout}.gpu_memory_utilization={UTILIZATION}"] if context.device == "cuda" else []),
    ]
    [loaded] = load(settings, complete=False)
    return loaded.config


async def _check(config: Config, context: Context, checks: Checks) -> None:
    spec = get_rollout_engine(context.engine)
    settings = engine_settings(config, context.device, 0)
    engine = make_engine(spec, settings)
    init_process_group(0, 1, "127.0.0.1", 0, context.device)
    try:
        await engine.start()
        trained = train_settings(config, 1, context.device).actor
        assert isinstance(trained, FsdpSettings)
        trainer = PolicyTrainer(FsdpEngine(trained))
        pair = EngineAndTrainer(engine, trainer, settings, coarsest_dtype(config, context.device), checks)
        await pair.check_reload()
        await pair.check_sleep(keeps_requests=spec.capabilities.continues_requests)
        await pair.check_probe()
    finally:
        await engine.close()
        close_process_group()


class EngineAndTrainer:
    """An engine and a trainer of the same model, which both have read from the same files."""

    def __init__(
        self,
        engine: RolloutEngine,
        trainer: PolicyTrainer,
        settings: RolloutEngineSettings,
        dtype: str,
        checks: Checks,
    ) -> None:
        self._engine, self._trainer, self._settings, self._checks = engine, trainer, settings, checks
        assert isinstance(trainer.actor, FsdpEngine)
        model = trainer.actor.model.hf
        self._parameters = dict(model.named_parameters())
        self._probe_dtype = dtype
        vocabulary = model.config.get_text_config().vocab_size
        self._probe = Probe.random(vocabulary, tolerance=TOLERANCES[dtype], dtype=dtype)
        self._version = 0
        self._old = self._copy_weights()  # those of the engine
        self._expected = trainer.compute_logprobs(self._probe.sequences)
        self._random = torch.Generator().manual_seed(0)

    def _copy_weights(self) -> dict[str, Tensor]:
        return {name: _local(each).cpu().clone() for name, each in self._parameters.items()}

    def _set_weights(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            _local(self._parameters[name]).copy_(value)

    def _change_weights(self) -> None:
        """Change the trainer's weights so far that the probe can tell them from the old ones."""
        self._old, before = self._copy_weights(), self._expected
        for parameter in self._parameters.values():
            local = _local(parameter)
            local.mul_(1 + CHANGE * torch.randn(local.shape, generator=self._random).to(local.device))
        sequences = self._probe.sequences
        self._probe = self._probe.calibrate(self._trainer.measure_rounding(sequences, self._probe_dtype))
        self._expected = self._trainer.compute_logprobs(sequences)
        values = [value for row in self._expected for value in row]
        self._checks.require(all(map(math.isfinite, values)), "log-probs of the trainer are not finite")
        changed = _distance(before, self._expected)
        self._checks.require(
            changed > 2 * self._probe.tolerance,
            f"the probe cannot tell new weights from old ones: log-probs differ by {changed:.3g}, and by up to "
            f"{self._probe.tolerance:.3g} where weights are equal",
        )

    def _pack(self) -> list[WeightBucket]:
        """Return the trainer's weights: a bucket for each layer, and one for the rest."""
        layers: dict[str, list[tuple[str, Tensor]]] = {}
        for name, weight in self._trainer.actor.weights(getattr(torch, self._settings.dtype)):
            number = re.search(r"\.(\d+)\.", name)
            layers.setdefault(number[1] if number else "", []).append((name, weight.detach().cpu()))
        return [bucket for each in layers.values() for bucket in pack(each, max_bytes=_buffer_size(each))]

    async def _send(self, buckets: Sequence[WeightBucket]) -> str:
        """Load buckets into the engine; return what its probe finds wrong with its weights, or an empty string."""
        self._version += 1
        await load_weights(self._engine, buckets, self._version)
        if (found := await self._engine.version()) != self._version:
            return f"the engine reports version {found} of the weights instead of {self._version}"
        reply = await self._engine.compute_logprobs(self._probe.sequences)
        gap, problems = compare_logprobs(self._probe, self._expected, {0: reply}, version=self._version)
        if problems:
            return self._find_lost_bucket(reply) or f"wrong weights: {problems[0]}"
        self._checks.figures |= {"probe gap": gap, "tolerance": self._probe.tolerance}
        return ""

    def _find_lost_bucket(self, reply: list[list[float]]) -> str:
        """Return which bucket did not reach the engine, if the old weights of one of them explain its log-probs."""
        new, buckets = self._copy_weights(), [[slot.name for slot in bucket.slots] for bucket in self._pack()]
        for names in [[*new], *buckets]:
            if not set(names) <= new.keys():  # the model has other parameters than its checkpoint
                continue
            self._set_weights({name: self._old[name] for name in names})
            gap = _distance(self._trainer.compute_logprobs(self._probe.sequences), reply)
            self._set_weights(new)
            if gap <= self._probe.tolerance:
                what = "all buckets were" if len(names) == len(new) else "a bucket was"
                return f"{what} lost: the engine has the old weights of {list_some(names, separator=', ')}"
        return ""

    async def check_reload(self) -> None:
        """Check new weights in an engine that is awake."""
        self._change_weights()
        problem = await self._send(self._pack())
        self._checks.require(not problem, problem)

    async def check_sleep(self, *, keeps_requests: bool) -> None:
        """Check that nothing runs while the engine sleeps, and that it has new weights when it wakes.

        Requests that were running go on afterwards, with the new weights, if the engine can do that.
        """
        start = time.perf_counter()
        await self._generate()
        seconds = time.perf_counter() - start
        running = [asyncio.create_task(self._request()) for _ in range(REQUESTS)] if keeps_requests else []
        await asyncio.sleep(seconds / 4 if running else 0)
        free = _free_bytes(self._settings.device)
        await self._engine.sleep()
        if running:
            done = sum(task.done() for task in running)
            self._checks.require(done < len(running), "every request had ended before the engine slept")
            await asyncio.sleep(seconds + SLEEPING_S)
            finished = sum(task.done() for task in running) - done
            self._checks.require(not finished, f"broken sleep: {finished} requests ended while the engine slept")
        self._check_memory(free)
        self._change_weights()
        problem = await self._send(self._pack())
        self._checks.require(not problem, f"after sleep: {problem}")
        completions = [each for each in await asyncio.gather(*running) if len(set(each.versions.tolist())) > 1]
        self._checks.require(bool(completions) or not running, "no request went on after the engine woke")
        for completion in completions:
            self._check_completion(completion)
        await self._generate()
        self._checks.figures["requests over sleep"] = len(completions)

    def _check_memory(self, before: int | None) -> None:
        after = _free_bytes(self._settings.device)
        if before is None or after is None:
            self._checks.notes.append("memory of a sleeping engine not checked: it needs a GPU")
            return
        expected = 0.5 * UTILIZATION * torch.cuda.get_device_properties(0).total_memory / GIB
        freed = (after - before) / GIB
        self._checks.at_least("GiB freed by sleep", freed, expected, "broken sleep: it freed too few GiB")

    async def _request(self) -> Completion:
        return await self._engine.generate(list(self._probe.sequences[0][:PROMPT]), SamplingParams(RESPONSE))

    async def _generate(self) -> None:
        for completion in await asyncio.gather(*(self._request() for _ in range(REQUESTS))):
            self._check_completion(completion)
            versions = set(completion.versions.tolist())
            self._checks.require(
                versions == {self._version}, f"tokens of versions {sorted(versions)} instead of {self._version}"
            )

    def _check_completion(self, completion: Completion) -> None:
        values = completion.logprobs.tolist()
        self._checks.require(
            0 < len(values) <= RESPONSE and all(-math.inf < value <= 0 for value in values),
            "log-probs of generated tokens are not finite or above 0",
        )

    async def check_probe(self) -> None:
        """Check that the probe finds a tensor of noise and a bucket that is missing, and then verifies all weights."""
        self._change_weights()
        buckets = self._pack()
        middle = len(buckets) // 2
        name, damaged = _damage(buckets[middle])
        for what, sent in (
            (f"noise instead of {name}", [*buckets[:middle], damaged, *buckets[middle + 1 :]]),
            (f"a missing bucket, with {name}", [*buckets[:middle], *buckets[middle + 1 :]]),
        ):
            await self._send_old()
            try:
                problem = await self._send(sent)
            except VerlError as error:  # the engine itself has refused the weights
                problem = str(error)
            self._checks.require(bool(problem), f"blind probe: it did not find {what}")
        problem = await self._send(buckets)
        self._checks.require(not problem, problem)

    async def _send_old(self) -> None:
        """Bring the engine to the weights before the last change, without a look at it."""
        new = self._copy_weights()
        self._set_weights(self._old)
        buckets = self._pack()
        self._set_weights(new)
        self._version += 1
        await load_weights(self._engine, buckets, self._version)


def _damage(bucket: WeightBucket) -> tuple[str, WeightBucket]:
    """Return the name of the largest matrix of a bucket, and the bucket with noise of the same size in its place."""
    slot = max((slot for slot in bucket.slots if len(slot.shape) == 2), key=lambda slot: math.prod(slot.shape))
    damaged = WeightBucket(bucket.slots, bucket.data.copy())
    for name, tensor in unpack(damaged.slots, torch.from_numpy(damaged.data)):
        if name == slot.name:
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
            tensor.copy_(noise * tensor.float().std())
    return slot.name, damaged


def _buffer_size(weights: Sequence[tuple[str, Tensor]]) -> int:
    """Return a size with room for all of the weights."""
    return sum(each.nbytes + 64 for _, each in weights)  # tensors are aligned to 64 bytes


def _local(parameter: Tensor) -> Tensor:
    """Return the values of a parameter of the only rank."""
    values = parameter.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def _distance(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def _free_bytes(device: str) -> int | None:
    """Return the free memory of the device; None on the CPU."""
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else None
