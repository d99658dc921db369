"""Training from Python: a model, a reward, prompts, `.train()`. The same run underneath as `verl train`.

>>> from verl import GRPOTrainer
>>> done = GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", reward=lambda response: -len(response), prompts=["Hello"]).train()
>>> done.rewards[-1], done.model_path
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from verl.checkpoint.manifest import CheckpointDir
from verl.config.load import LoadedConfig, load_dict
from verl.config.paths import set_path
from verl.data.prompts import Prompts, write_rows
from verl.errors import CheckpointError, ConfigError, EngineError
from verl.tracking.console import Console
from verl.trainer.launcher import train
from verl.workers.inputs import check_model, tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["GRPOTrainer", "PPOTrainer", "TrainResult", "Training", "TrainingConfig"]

T = TypeVar("T")
Reward = Callable[..., Any]


AT_THE_END = 1_000_000_000
"""As `trainer.test_freq`: no run has so many steps, and after the last one the trained model is looked at."""


@dataclass(frozen=True)  # without slots: loops of one's own save `config.__dict__`
class TrainingConfig:
    """The settings that most runs change. All others (`verl config` lists them) go into `settings`, by their names.

    >>> TrainingConfig(batch_size=64, settings={"actor_rollout_ref.actor.entropy_coeff": 0.01})
    """

    total_epochs: int = 1
    total_steps: int | None = None  # instead of epochs
    batch_size: int = 8  # prompts a step
    group_size: int | None = None  # answers a prompt; None: as many as the algorithm needs
    learning_rate: float = 1e-6
    ppo_epochs: int = 1  # passes over the answers of a step
    clip_range: float = 0.2
    kl_coef: float = 0.0  # how strongly the policy is held to the model it began as
    max_prompt_length: int = 512  # tokens
    max_response_length: int = 512  # tokens
    temperature: float = 1.0
    devices: int | None = None  # None: the GPUs of this machine, or one process on its CPU
    seed: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What became of a run: the metrics of every step, and where the trained model is."""

    metrics: list[dict[str, Any]]
    model_path: Path  # an ordinary Hugging Face folder

    @property
    def rewards(self) -> list[float]:
        """The mean reward of every step."""
        return [step["reward/mean"] for step in self.metrics if "reward/mean" in step]


Training = TrainResult
"""The former name of `TrainResult`."""


class _Trainer:
    """What the trainers share; each says which algorithm it is."""

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        config: TrainingConfig | None = None,
        *,
        reward: Reward | str | Path | None = None,
        prompts: Prompts | None = None,
        validation: Prompts | None = None,
        folder: str | Path = "verl-run",
        local: bool = False,
    ) -> None:
        """`model` and `tokenizer` are names, paths or objects of transformers; a model that was given as an object
        holds the trained weights afterwards.

        `reward` is a function, or the path of a file with `compute_score`; it asks by the names of its parameters for
        `prompt`, `response`, `ground_truth`, `data_source`, `extra_info`, and returns a number, or a dict with a
        "score". Without one, the shipped scorers are chosen by the data source of each row.
        `prompts` are texts, conversations, rows with a "prompt", a dataset or DataLoader of such, or the path of a
        file. All that the run writes is in `folder`. `local` runs it in this process, without Ray: breakpoints work.
        """
        self.model, self.tokenizer, self.config = model, tokenizer, config or TrainingConfig()
        self.reward, self.prompts, self.validation = reward, prompts, validation
        self.folder, self.local = Path(folder), local

    def train(self, prompts: Prompts | None = None) -> TrainResult:
        """Run to the end. Everything that is wrong with the settings is raised at once, before anything is started."""
        prompts = self.prompts if prompts is None else prompts
        if prompts is None:
            raise ConfigError(["prompts: there are none; give them to the trainer, or to train(prompts)"])
        self.folder.mkdir(parents=True, exist_ok=True)
        loaded, console = self._loaded(prompts), Console()
        console.hints(loaded.hints)
        given = self.reward if callable(self.reward) else None
        if code := _finish(train(loaded.config, console, given)):
            raise EngineError(_stopped(code, loaded.config.trainer.checkpoint_dir))
        done = _result(loaded.config.trainer.checkpoint_dir)
        if not isinstance(self.model, str | Path):
            _take_weights(self.model, done.model_path)
        return done

    def _loaded(self, prompts: Prompts) -> LoadedConfig:
        tree: dict[str, Any] = {}
        for key, value in {**self._common(prompts), **self._algorithm(), **self.config.settings}.items():
            set_path(tree, tuple(key.split(".")), value)
        loaded = load_dict(tree)
        trainer = loaded.config.trainer
        if trainer.save_freq == -1 or not trainer.save_hf:
            raise ConfigError(
                ["settings: the trained model is taken from the last checkpoint; leave out trainer.save_freq, save_hf"]
            )
        return loaded

    def _common(self, prompts: Prompts) -> dict[str, Any]:
        config, folder = self.config, self.folder
        if not isinstance(self.model, str | Path):
            check_model(self.model)
        validation = None if self.validation is None else write_rows(self.validation, folder / "validation.jsonl")
        return {
            "data.train_files": write_rows(
                prompts, folder / "prompts.jsonl", config.total_steps and config.total_steps * config.batch_size
            ),
            "data.val_files": validation,
            **({} if validation is None else {"trainer.test_freq": AT_THE_END}),
            "data.train_batch_size": config.batch_size,
            "data.max_prompt_length": config.max_prompt_length,
            "data.max_response_length": config.max_response_length,
            "actor_rollout_ref.model.path": _written(self.model, folder / "model"),
            "actor_rollout_ref.model.tokenizer_path": _written(self._own_tokenizer(), folder / "tokenizer"),
            "actor_rollout_ref.actor.optim.lr": config.learning_rate,
            "actor_rollout_ref.actor.ppo_mini_batch_size": config.batch_size,
            "actor_rollout_ref.actor.ppo_epochs": config.ppo_epochs,
            "actor_rollout_ref.actor.clip_ratio": config.clip_range,
            "actor_rollout_ref.rollout.name": "hf" if self.local else "vllm",
            "actor_rollout_ref.rollout.temperature": config.temperature,
            **({"trainer.total_epochs": config.total_epochs} if config.total_steps is None else {}),
            "trainer.total_training_steps": config.total_steps,
            "trainer.n_gpus_per_node": _devices() if config.devices is None else config.devices,
            "trainer.local": self.local,
            "trainer.seed": config.seed,
            "trainer.save_freq": None,  # after the last step
            "trainer.save_hf": True,
            "trainer.resume_mode": "disable",
            "trainer.default_local_dir": str(folder),
            **_reward_settings(self.reward),
        }

    def _own_tokenizer(self) -> str | Path | PreTrainedTokenizerBase | None:
        """What was given; of a model object, which is written without one, the tokenizer it was loaded with."""
        if isinstance(self.model, str | Path) or isinstance(self.tokenizer, str | Path):
            return self.tokenizer
        return tokenizer_for(self.model, self.tokenizer)

    def _algorithm(self) -> dict[str, Any]:
        raise NotImplementedError


class GRPOTrainer(_Trainer):
    """Answers to one prompt are compared with each other; no critic."""

    def _algorithm(self) -> dict[str, Any]:
        held = self.config.kl_coef > 0
        return {
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.rollout.n": self.config.group_size or 8,
            "actor_rollout_ref.actor.use_kl_loss": held,
            **({"actor_rollout_ref.actor.kl_loss_coef": self.config.kl_coef} if held else {}),
        }


class PPOTrainer(_Trainer):
    """A critic, of the same kind as the model, says what to expect; answers are compared with that."""

    def _algorithm(self) -> dict[str, Any]:
        held = self.config.kl_coef > 0
        return {
            "algorithm.adv_estimator": "gae",
            "actor_rollout_ref.rollout.n": self.config.group_size or 1,
            "algorithm.use_kl_in_reward": held,
            **({"algorithm.kl_ctrl.kl_coef": self.config.kl_coef} if held else {}),
        }


def _stopped(code: int, folder: Path) -> str:
    """Of a run that was asked to end, or ran out of time, before its last step."""
    saved = CheckpointDir(folder).latest()
    kept = f"saved step {saved} in {folder / f'global_step_{saved}'}" if saved is not None else "saved nothing"
    return (
        f"the run was ended before its last step (exit code {code}) and {kept}; to go on from there, train again with "
        'TrainingConfig(settings={"trainer.resume_mode": "auto"}) and the same folder'
    )


def _result(folder: Path) -> TrainResult:
    """What the run that has just ended wrote; not what a former one left in the same folder."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    last, saved = max((step["step"] for step in metrics), default=0), CheckpointDir(folder).latest()
    if saved != last:
        raise CheckpointError(
            f"{folder}: the run ended after step {last}, and the last checkpoint in it is of step {saved}: it holds no "
            "model of this run's end"
        )
    return TrainResult(metrics, folder / f"global_step_{saved}" / "actor" / "huggingface")


def _reward_settings(reward: Reward | str | Path | None) -> dict[str, Any]:
    if reward is None:
        return {}
    function = "reward.custom_reward_function"
    if not callable(reward):
        return {f"{function}.path": str(reward)}
    name = getattr(reward, "__name__", type(reward).__name__)
    return {f"{function}.path": f"python:{getattr(reward, '__module__', '')}", f"{function}.name": name}


def _written(thing: Any, folder: Path) -> str | None:
    """A path or a name, as it is; of an object, where it is written to."""
    if thing is None or isinstance(thing, str | Path):
        return None if thing is None else str(thing)
    thing.save_pretrained(folder)
    return str(folder)


def _take_weights(model: PreTrainedModel, path: Path) -> None:
    trained = type(model).from_pretrained(path, dtype=model.dtype)
    model.load_state_dict(trained.state_dict())


def _devices() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; beside the event loop of a notebook in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def known() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        return await work

    with ThreadPoolExecutor(1) as beside:
        ending = beside.submit(asyncio.run, known())
        try:
            return ending.result()
        except KeyboardInterrupt:  # of the notebook: the run ends as it does in a terminal, and is waited for
            for loop, task in running:
                loop.call_soon_threadsafe(task.cancel)
            raise
