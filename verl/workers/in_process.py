"""Rollout and training as two objects in the user's own process, for loops of one's own. No Ray.

Both are given the same model: the trainer changes its weights, the rollouts see it and bring them into the engine.

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
import threading
import warnings
import zlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from verl.cluster.handles import get_all
from verl.cluster.hangs import UNLIMITED_S
from verl.data.prompts import iter_rows
from verl.errors import ConfigError, EngineError, RewardError
from verl.types import Prompt, Sample, SamplingParams
from verl.workers.episodes import put_sample
from verl.workers.inputs import check_model, tokenizer_for
from verl.workers.rollout import make_engine

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from verl.agents.scoring import EpisodeScorer

__all__ = ["Rollout", "RolloutWorker", "TrainerWorker"]

T = TypeVar("T")
ENGINES = ("vllm", "hf")
BUCKET_BYTES = 512 * 1024 * 1024
_GROUPS = itertools.count()
"""Answers of one prompt share a number that no other prompt has, whichever worker wrote them."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer: the prompt as it was given, the answer as text, its score, and the tokens for training."""

    prompt: Any
    response: str
    score: float
    sample: Sample
    temperature: float = 1.0  # it was drawn at


class RolloutWorker:
    """An engine that answers prompts with the model's current weights, and scores the answers."""

    def __init__(
        self,
        model: PreTrainedModel,
        inference_engine: str = "vllm",
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
        """`n` answers a prompt; `max_model_len` tokens of prompt and answer, as many as the model reads up to 4,096
        unless it is given. Without a `reward` the shipped scorers are chosen by the `data_source` of a prompt's
        row. `inference_engine` is "vllm", on the first GPU that is visible, or "hf" (transformers: slow, in this
        process)."""
        import torch

        check_model(model)
        if inference_engine not in ENGINES:
            raise ConfigError([f"inference_engine: {inference_engine!r} is not an engine; use {' or '.join(ENGINES)}"])
        place = engine_device(inference_engine, usable(device))
        self.model, self.n = model, n
        self.tokenizer = tokenizer_for(model, tokenizer)
        self._sampling = SamplingParams(
            max_new_tokens, temperature, top_p, stop_token_ids=_ends(model, self.tokenizer.eos_token_id)
        )
        self._reward = reward
        self._loop = _Loop()
        self._folder = tempfile.TemporaryDirectory(prefix="verl-rollout-")
        model.save_pretrained(self._folder.name)
        self.tokenizer.save_pretrained(self._folder.name)
        longest = max_model_len or min(4096, model.config.get_text_config().max_position_embeddings)
        settings = _engine_settings(inference_engine, self._folder.name, place, longest)
        self._dtype = getattr(torch, settings["dtype"])
        self._engine = make_engine(inference_engine, settings)
        self._seen: list[int] = []
        self._version, self._is_open = -1, True
        atexit.register(self.close)
        try:
            self._score: EpisodeScorer = self._loop.finish(self._scoring())
            with _main_hidden():
                self._loop.finish(self._engine.start())
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Iterable[Any]) -> list[Rollout]:
        """`n` scored answers to each prompt: a text, a list of messages, or a row with a "prompt" and what the reward
        is told of it; or batches of these. An answer that could not be scored raises what went wrong."""
        if not self._is_open:
            raise EngineError("generate: this RolloutWorker is closed; make another")
        return self._loop.finish(self._generate(list(iter_rows(prompts))))

    def close(self) -> None:
        """End the engine's processes; done at the end of the program, if not before."""
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self.close)
        self._loop.finish(self._engine.close())
        self._loop.close()
        self._folder.cleanup()

    async def _generate(self, prompts: Sequence[Mapping[str, Any]]) -> list[Rollout]:
        from verl.agents.runner import EpisodeRunner

        rows = [self._prompt(number, row) for number, row in enumerate(prompts)]
        await self._take_weights()
        runner = EpisodeRunner(self._engine.generate, self._score, self._text)
        seeds: list[int | None] = [None] * self.n
        answered = await asyncio.gather(*(runner.run(prompt, next(_GROUPS), seeds, self._sampling) for prompt in rows))
        return [
            self._rollout(prompt, sample) for prompt, samples in zip(rows, answered, strict=True) for sample in samples
        ]

    async def _take_weights(self) -> None:
        """Bring the model's weights into the engine, unless it has these very ones."""
        from verl.weights.bucket import pack
        from verl.weights.hf_names import to_hf

        own = to_hf(self.model, ((name, each.detach()) for name, each in self.model.named_parameters()))
        buckets = list(pack(own, max_bytes=BUCKET_BYTES, dtype=self._dtype))
        if (now := [zlib.crc32(bucket.data.data) for bucket in buckets]) == self._seen:
            return
        await self._engine.load_weights(buckets, self._version + 1)
        self._version, self._seen = self._version + 1, now

    async def _scoring(self) -> EpisodeScorer:
        from verl.agents.scoring import score_by_function
        from verl.rewards.pool.in_process import InProcessRewards
        from verl.rewards.settings import RewardFunctionSettings

        settings = RewardFunctionSettings()
        if self._reward is not None:
            name = getattr(self._reward, "__name__", type(self._reward).__name__)
            settings = RewardFunctionSettings("python:", name, function=self._reward)
        functions = InProcessRewards(settings)
        await functions.start()
        return score_by_function(functions.score)

    def _prompt(self, number: int, row: Mapping[str, Any]) -> Prompt:
        from verl.data.chat import encode_prompts
        from verl.data.columns import extract_reward_fields
        from verl.rewards.reward_function import explain_no_scorer, has_builtin_scorer

        fields = dict(row)
        raw = fields.pop("prompt")
        [tokens] = encode_prompts(self.tokenizer, [raw], {})
        told = extract_reward_fields(fields)
        if self._reward is None and not has_builtin_scorer(told["data_source"]):
            raise RewardError(
                f"prompts[{number}]: nothing would score its answers, and none was generated; give the worker one: "
                f"RolloutWorker(..., reward=my_function). {explain_no_scorer(told['data_source'])}"
            )
        return Prompt(number, tokens, raw=raw, **told)

    def _rollout(self, prompt: Prompt, sample: Sample) -> Rollout:
        if sample.failure is not None:
            raise RewardError(sample.failure.message)
        answer = self._text(sample.tokens[sample.mask].tolist())
        return Rollout(prompt.raw, answer, sample.score, sample, self._sampling.temperature)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


class TrainerWorker:
    """Trains a model on scored answers, by the engine and the algorithms of `verl train`."""

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
        """What `optimizer`, an Adam or AdamW, is told (learning rate, betas, eps, weight decay) holds here, and its
        learning rate is followed from step to step; it does not step itself, since the engine keeps the weights in
        shards of its own, but its `state_dict()` has the engine's moments, and those that it comes with are gone on
        with. Activations are checkpointed, and layers compute in bfloat16, as the model says. `mini_batch_size` is in
        prompts; None: all of a step. After a step the model holds the new weights."""
        import torch

        from verl.algorithms.advantages import ESTIMATORS
        from verl.algorithms.settings import AlgorithmSettings, LossOptions
        from verl.custom_functions import load_function
        from verl.training.fsdp import FsdpEngine
        from verl.training.policy import PolicyTrainer
        from verl.training.process_group import close_process_group, init_process_group
        from verl.training.settings import FsdpSettings
        from verl.workers.optimizer_state import take_moments

        check_model(model)
        if estimator in ("gae", "remax"):
            needs = {"gae": "a critic", "remax": "greedy answers beside the others"}[estimator]
            raise ConfigError([f"estimator={estimator}: needs {needs}, which only whole runs have; use a trainer"])
        algorithm = AlgorithmSettings(
            estimator=estimator, loss_options=LossOptions(clip_low=clip_range, clip_high=clip_range)
        )
        try:
            load_function(estimator, ESTIMATORS, "estimator")
        except ValueError as error:
            raise ConfigError([str(error)]) from error
        told, place = _told(optimizer), usable(device)
        if torch.distributed.is_initialized():
            raise EngineError(
                "TrainerWorker: this process has joined a group of ranks already; close() the other TrainerWorker "
                "first (a group of your own: torch.distributed.destroy_process_group())"
            )
        if ":" in place:
            torch.cuda.set_device(place)
        init_process_group(0, 1, "127.0.0.1", 0, place)
        try:
            with tempfile.TemporaryDirectory(prefix="verl-train-") as folder:
                model.save_pretrained(folder)
                told |= {"device": place, "temperature": temperature, **_as_is(model)}
                self._engine = FsdpEngine(FsdpSettings(folder, **told))
            self._policy = PolicyTrainer(self._engine, algorithm)
            if optimizer is not None:
                take_moments(self._engine, optimizer)
        except BaseException:
            close_process_group()
            raise
        self.model, self._mini_batch, self._budget = model, mini_batch_size, micro_batch_tokens
        self._optimizer, self._temperature, self._is_open = optimizer, temperature, True
        atexit.register(self.close)

    def train_step(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """One step of the algorithm on all answers of some prompts; its metrics, as a run shows them."""
        from verl.data.plan import Planner, UpdateSizes
        from verl.training.schedule import Schedule
        from verl.weights.hf_names import load_hf
        from verl.workers.optimizer_state import show_moments

        if not self._is_open:
            raise EngineError("train_step: this TrainerWorker is closed; make another")
        if not rollouts:
            raise EngineError("train_step: there is nothing to train on")
        if other := {rollout.temperature for rollout in rollouts} - {self._temperature}:
            raise ConfigError(
                [
                    f"temperature: the answers were drawn at {', '.join(map(str, sorted(other)))}, and are trained at "
                    f"{self._temperature}: of another distribution; give both workers the same"
                ]
            )
        if self._optimizer is not None:  # a scheduler may have changed it
            self._engine.schedule = Schedule(self._optimizer.param_groups[0]["lr"])
        samples = [rollout.sample for rollout in rollouts]
        groups = len({sample.group for sample in samples})
        planner = Planner(1, UpdateSizes(self._mini_batch or groups, None, self._budget))
        plan = planner.plan([put_sample(sample, number) for number, sample in enumerate(samples)])
        [mine] = plan.ranks
        prepared = self._policy.prepare(get_all(mine.refs, timeout=UNLIMITED_S), mine)
        updated = self._policy.update(mine)
        load_hf(self.model, self._engine.weights())
        if self._optimizer is not None:
            show_moments(self._engine, self._optimizer)
        return plan.metrics | prepared | updated

    def close(self) -> None:
        """Leave the group of ranks that it made: this process may then make another. Done at the end, if not before."""
        from verl.training.process_group import close_process_group

        if not self._is_open:  # the group that is there by now may be another's
            return
        self._is_open = False
        atexit.unregister(self.close)
        close_process_group()


def usable(device: str | None) -> str:
    """The device that was asked for, or what there is, with a word about it."""
    import torch

    there = torch.cuda.is_available()
    if device is not None and device.startswith("cuda") and not there:
        warnings.warn(f"device={device!r}: there is no CUDA device here; using the CPU", stacklevel=3)
        return "cpu"
    return device or ("cuda" if there else "cpu")


def engine_device(name: str, device: str) -> str:
    """Where an engine will be. vLLM chooses by what the process sees, and takes no number."""
    kind, _, number = device.partition(":")
    if name == "vllm" and number not in ("", "0"):
        raise ConfigError(
            [
                f"device={device!r}: vLLM takes the first GPU that the process sees; start the program with "
                f"CUDA_VISIBLE_DEVICES={number} and give device='cuda', or use inference_engine='hf'"
            ]
        )
    return kind if name == "vllm" else device


def _engine_settings(name: str, folder: str, device: str, max_model_len: int) -> dict[str, Any]:
    settings = {"model_path": folder, "dtype": "float32" if device == "cpu" else "bfloat16", "device": device}
    return {**settings, "max_model_len": max_model_len} if name == "vllm" else settings


def _ends(model: PreTrainedModel, own: int | None) -> tuple[int, ...]:
    ends = getattr(model.generation_config, "eos_token_id", None)
    return tuple(sorted({own, *(ends if isinstance(ends, list) else [ends])} - {None}))


def _told(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    import torch

    if optimizer is None:
        return {}
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or len(optimizer.param_groups) != 1:
        raise ConfigError([f"optimizer: {type(optimizer).__name__} must be an AdamW with one group of parameters"])
    return {name: optimizer.param_groups[0][name] for name in ("lr", "betas", "eps", "weight_decay")}


def _as_is(model: PreTrainedModel) -> dict[str, Any]:
    """What the model says of how it is trained; weights and moments are kept in float32."""
    import torch

    compute = "bfloat16" if model.dtype == torch.bfloat16 else "float32"
    return {"compute_dtype": compute, "gradient_checkpointing": model.is_gradient_checkpointing}


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Processes that vLLM starts meanwhile do not run the user's script once more, which multiprocessing has them do
    for what they might need of it: nothing."""
    main = vars(sys.modules["__main__"])
    kept: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(kept)


class _Loop:
    """An event loop in a thread of its own: engines live on it, and callers need none, or may have another."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="verl-rollout", daemon=True)
        self._thread.start()

    def finish(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
