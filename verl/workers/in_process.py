"""Rollout and training as two objects in the user's process, for custom training loops without Ray.

Both get the same model: the trainer updates its weights, and the rollout worker loads them into its engine.

>>> rollouts = RolloutWorker(model, inference_engine="vllm", reward=my_reward, n=8)
>>> trainer = TrainerWorker(model, optimizer)
>>> for _ in range(100):
...     metrics = trainer.train_step(rollouts.generate(prompts))
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.agents.episode import EpisodeRunner, EpisodeScorer, score_by_function
from verl.algorithms.advantages import ESTIMATORS
from verl.algorithms.settings import AlgorithmSettings, LossOptions
from verl.cluster.hangs.pending_calls import UNLIMITED_S
from verl.cluster.local import detect_local_device
from verl.cluster.object_store import get_all
from verl.config.batch_sizes import BatchSizes
from verl.config.rollout_engines import (
    DEFAULT_ENGINE,
    IN_PROCESS_ENGINE,
    RolloutEngineSpec,
    get_rollout_engine,
    list_rollout_engines,
)
from verl.custom_functions import load_function
from verl.data.chat import encode_prompts
from verl.data.dataset import extract_reward_fields
from verl.data.plan import Planner
from verl.data.prompts import iter_rows
from verl.errors import ConfigError, EngineError, RewardError
from verl.models.stop_tokens import list_stop_tokens
from verl.rewards.pool.pool import InProcessRewards
from verl.rewards.reward_function import explain_no_scorer, find_builtin
from verl.rewards.settings import RewardFunctionSettings
from verl.rollout.engine import load_weights, make_engine
from verl.rollout.settings import RolloutEngineSettings
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.policy.trainer import PolicyTrainer
from verl.training.process_group import close_process_group, init_process_group
from verl.training.settings import Schedule
from verl.types import Prompt, Sample, SamplingParams
from verl.waiting import EventLoopThread
from verl.weights.bucket import load_hf, pack, to_hf
from verl.workers.episodes import put_sample
from verl.workers.model_objects import check_model_object, find_tokenizer
from verl.workers.optimizer_state import expose_moments, load_moments, read_optimizer

T = TypeVar("T")
BUCKET_BYTES = 512 * 2**20
_GROUPS = itertools.count()
"""Group numbers of prompts, unique over all workers."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One scored response: the prompt as it was passed, the response as text, and the tokens for training."""

    prompt: Any
    response: str
    score: float
    sample: Sample
    temperature: float = 1.0  # at which the response was sampled


class RolloutWorker:
    """An engine that generates responses with the model's current weights, and scores them.

    Args:
        model: The model; its current weights are used for every `generate`.
        inference_engine: "vllm", on the first visible GPU; "hf" (transformers: slow, in this process); or another
            registered rollout engine.
        device: "cuda" or "cpu"; by default a GPU if there is one.
        tokenizer: By default the one at the path that the model was loaded from.
        reward: Reward function, as for the trainers. By default the built-in scorer of a prompt's `data_source`.
        n: Responses per prompt.
        max_new_tokens: Longest response, in tokens.
        max_model_len: Longest prompt and response together; by default that of the model, at most 4,096.
        temperature: Sampling temperature.
        top_p: Nucleus sampling.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        inference_engine: str = DEFAULT_ENGINE,
        device: str | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reward: Callable[..., Any] | None = None,
        n: int = 8,
        max_new_tokens: int = 512,
        max_model_len: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> None:
        check_model_object(model)
        if inference_engine not in (engines := list_rollout_engines()):
            raise ConfigError([f"inference_engine: {inference_engine!r} is not an engine; use {' or '.join(engines)}"])
        spec = get_rollout_engine(inference_engine)
        device = resolve_engine_device(spec, _resolve_device(device))
        self.model, self.n = model, n
        self.tokenizer = find_tokenizer(model, tokenizer)
        self._sampling = SamplingParams(
            max_new_tokens,
            temperature,
            top_p,
            stop_token_ids=list_stop_tokens(model.generation_config, self.tokenizer.eos_token_id),
        )
        self._reward = reward
        self._thread = EventLoopThread("verl-rollout")
        self._folder = tempfile.TemporaryDirectory(prefix="verl-rollout-")
        model.save_pretrained(self._folder.name)
        self.tokenizer.save_pretrained(self._folder.name)
        max_model_len = max_model_len or min(4096, model.config.get_text_config().max_position_embeddings)
        dtype = "float32" if device == "cpu" else "bfloat16"
        settings: type[RolloutEngineSettings] = spec.load(spec.settings)
        self._dtype = getattr(torch, dtype)
        self._engine = make_engine(
            spec, settings(self._folder.name, dtype=dtype, device=device, max_model_len=max_model_len)
        )
        self._checksums: list[int] = []
        self._version, self._is_open = -1, True
        atexit.register(self.close)
        try:
            self._score: EpisodeScorer = self._run(self._start_scoring())
            with _hide_main_module():
                self._run(self._engine.start())
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Iterable[Any]) -> list[Rollout]:
        """Generate and score `n` responses to each prompt.

        Args:
            prompts: Texts, lists of messages, rows with a "prompt" and the fields of the reward function, or batches
                of these.

        Returns:
            The responses; responses to the same prompt are adjacent.

        Raises:
            RewardError: If a response could not be scored.
        """
        if not self._is_open:
            raise EngineError("generate: this RolloutWorker is closed; create another")
        return self._run(self._generate(list(iter_rows(prompts))))

    def close(self) -> None:
        """Stop the engine; done at the end of the program, if not before."""
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self.close)
        self._run(self._engine.close())
        self._thread.close()
        self._folder.cleanup()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.submit(work).result()

    async def _generate(self, prompts: Sequence[Mapping[str, Any]]) -> list[Rollout]:
        rows = [self._encode(index, row) for index, row in enumerate(prompts)]
        await self._sync_weights()
        runner = EpisodeRunner(self._engine.generate, self._score, self._decode)
        seeds: list[int | None] = [None] * self.n
        groups = await asyncio.gather(*(runner.run(prompt, next(_GROUPS), seeds, self._sampling) for prompt in rows))
        return [
            self._to_rollout(prompt, sample) for prompt, samples in zip(rows, groups, strict=True) for sample in samples
        ]

    async def _sync_weights(self) -> None:
        """Load the model's weights into the engine, unless they are unchanged."""
        weights = to_hf(self.model, ((name, each.detach()) for name, each in self.model.named_parameters()))
        buckets = list(pack(weights, max_bytes=BUCKET_BYTES, dtype=self._dtype))
        if (checksums := [zlib.crc32(bucket.data.data) for bucket in buckets]) == self._checksums:
            return
        await load_weights(self._engine, buckets, self._version + 1)
        self._version, self._checksums = self._version + 1, checksums

    async def _start_scoring(self) -> EpisodeScorer:
        settings = RewardFunctionSettings()
        if self._reward is not None:
            name = getattr(self._reward, "__name__", type(self._reward).__name__)
            settings = RewardFunctionSettings("python:", name, function=self._reward)
        functions = InProcessRewards(settings)
        await functions.start()
        return score_by_function(functions.score)

    def _encode(self, index: int, row: Mapping[str, Any]) -> Prompt:
        fields = dict(row)
        raw = fields.pop("prompt")
        [tokens] = encode_prompts(self.tokenizer, [raw], {})
        reward_fields = extract_reward_fields(fields)
        if self._reward is None and find_builtin(reward_fields["data_source"]) is None:
            raise RewardError(
                f"prompts[{index}]: nothing can score its responses; pass a reward function: "
                f"RolloutWorker(..., reward=my_function). {explain_no_scorer(reward_fields['data_source'])}"
            )
        return Prompt(index, tokens, raw=raw, **reward_fields)

    def _to_rollout(self, prompt: Prompt, sample: Sample) -> Rollout:
        if sample.failure is not None:
            raise RewardError(sample.failure.message)
        response = self._decode(sample.tokens[sample.mask].tolist())
        return Rollout(prompt.raw, response, sample.score, sample, self._sampling.temperature)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


class TrainerWorker:
    """Trains a model on scored responses, with the engine and the algorithms of `verl train`.

    Layers compute in the model's dtype, weights and optimizer state are in float32; activations are checkpointed if the
    model enables it.

    Args:
        model: The model; it holds the new weights after every step.
        optimizer: An Adam or AdamW over `model.parameters()`, for its learning rate (also as schedulers change
            it), betas, eps, weight decay and state. The engine steps with its own optimizer; `state_dict()` of
            this one has its state.
        device: "cuda", "cuda:N" or "cpu"; by default a GPU if there is one.
        estimator: Advantage estimator: a name, or `package.module:function`.
        clip_range: Clipping of the policy ratio.
        temperature: Temperature at which the responses are sampled.
        mini_batch_size: Prompts per optimizer step; by default all of a step.
        micro_batch_tokens: Tokens per forward pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer | None = None,
        device: str | None = None,
        *,
        estimator: str = "grpo",
        clip_range: float = 0.2,
        temperature: float = 1.0,
        mini_batch_size: int | None = None,
        micro_batch_tokens: int = 16384,
    ) -> None:
        check_model_object(model)
        _check_estimator(estimator)
        loss = LossOptions(clip_low=clip_range, clip_high=clip_range)
        settings, device = read_optimizer(optimizer), _resolve_device(device)
        if torch.distributed.is_initialized():
            raise EngineError(
                "TrainerWorker: this process already has a process group; close() the other TrainerWorker first, or "
                "call torch.distributed.destroy_process_group()"
            )
        if ":" in device:
            torch.cuda.set_device(device)
        init_process_group(0, 1, "127.0.0.1", 0, device)
        try:
            with tempfile.TemporaryDirectory(prefix="verl-train-") as folder:
                model.save_pretrained(folder)
                compute_dtype = "bfloat16" if model.dtype == torch.bfloat16 else "float32"
                settings |= {"device": device, "temperature": temperature, "compute_dtype": compute_dtype}
                settings["gradient_checkpointing"] = model.is_gradient_checkpointing
                self._engine = FsdpEngine(FsdpSettings(folder, **settings))  # whose optimizer state is exchanged
            self._policy = PolicyTrainer(self._engine, AlgorithmSettings(estimator=estimator, loss_options=loss))
            if optimizer is not None:
                load_moments(self._engine, optimizer)
        except BaseException:
            close_process_group()
            raise
        self.model, self._mini_batch_size, self._micro_batch_tokens = model, mini_batch_size, micro_batch_tokens
        self._optimizer, self._temperature, self._is_open = optimizer, temperature, True
        atexit.register(self.close)

    def train_step(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Train one step on all responses of some prompts.

        Args:
            rollouts: The responses, as `RolloutWorker.generate` returns them.

        Returns:
            The metrics of the step, with the names of `verl train`.
        """
        if not self._is_open:
            raise EngineError("train_step: this TrainerWorker is closed; create another")
        if not rollouts:
            raise EngineError("train_step: no rollouts to train on")
        if other := {rollout.temperature for rollout in rollouts} - {self._temperature}:
            raise ConfigError(
                [
                    f"temperature: the responses were sampled at {', '.join(map(str, sorted(other)))} but are trained "
                    f"at {self._temperature}; pass the same temperature to both workers"
                ]
            )
        if self._optimizer is not None:  # a scheduler may have changed the learning rate
            self._engine.schedule = Schedule(self._optimizer.param_groups[0]["lr"])
        samples = [rollout.sample for rollout in rollouts]
        groups = len({sample.group for sample in samples})
        planner = Planner(1, BatchSizes(self._mini_batch_size or groups, None, self._micro_batch_tokens))
        plan = planner.plan([put_sample(replace(sample, index=index)) for index, sample in enumerate(samples)])
        [rank_plan] = plan.ranks
        prepared = self._policy.prepare(get_all(rank_plan.refs, timeout=UNLIMITED_S), rank_plan)
        updated = self._policy.update(rank_plan)
        load_hf(self.model, self._engine.weights())
        if self._optimizer is not None:
            expose_moments(self._engine, self._optimizer)
        return plan.metrics | prepared | updated

    def close(self) -> None:
        """Close the process group, so that another worker can be created; done at the end, if not before."""
        if not self._is_open:  # the current process group may be another worker's
            return
        self._is_open = False
        atexit.unregister(self.close)
        close_process_group()


def _resolve_device(device: str | None) -> str:
    available = detect_local_device()
    if device is not None and device.startswith("cuda") and available == "cpu":
        warnings.warn(f"device={device!r}: CUDA is not available; using the CPU", stacklevel=3)
        return "cpu"
    return device or available


def resolve_engine_device(spec: RolloutEngineSpec, device: str) -> str:
    """Return the device of an engine, which may have to be the first visible GPU."""
    kind, _, index = device.partition(":")
    if spec.capabilities.selects_device:
        return device
    if index not in ("", "0"):
        raise ConfigError(
            [
                f"device={device!r}: {spec.title} takes the first visible GPU; start the program with "
                f"CUDA_VISIBLE_DEVICES={index} and pass device='cuda', or use "
                f"inference_engine={IN_PROCESS_ENGINE!r}"
            ]
        )
    return kind


def _check_estimator(estimator: str) -> None:
    inputs = {"gae": "a critic", "remax": "greedy responses", "gdpo": "reward components"}
    if needs := inputs.get(estimator):
        raise ConfigError([f"estimator={estimator}: needs {needs}; use PPOTrainer, GRPOTrainer or verl train"])
    try:
        load_function(estimator, ESTIMATORS, "estimator")
    except ValueError as error:
        raise ConfigError([str(error)]) from error


@contextmanager
def _hide_main_module() -> Iterator[None]:
    """Keep multiprocessing from running the user's script again in the processes that vLLM starts."""
    main = vars(sys.modules["__main__"])
    saved: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(saved)
