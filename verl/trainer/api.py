"""The Python API for training: the same runs as `verl train`.

>>> from verl import GRPOTrainer
>>> trainer = GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", reward=lambda response: -len(response), prompts=["Hello"])
>>> result = trainer.train()
>>> result.rewards[-1], result.model_path
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from verl.checkpoint.manifest import CheckpointDir, find_free_folder
from verl.config.load import LoadedConfig, load_dict
from verl.config.paths import set_path
from verl.config.rollout_engines import DEFAULT_ENGINE, IN_PROCESS_ENGINE
from verl.custom_functions import PICKLE, pickle_by_value
from verl.data.prompts import Prompts, write_rows
from verl.errors import CheckpointError, ConfigError, DataError, EngineError, RewardError
from verl.private_files import create_private_file, make_folder
from verl.tracking.console import Console
from verl.trainer.launcher import continues_in, train
from verl.trainer.next_steps import describe_end, describe_stop
from verl.workers.model_objects import check_model_object, find_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")
Reward = Callable[..., Any]


ONLY_AT_END = 1_000_000_000
"""A `trainer.test_freq` that no run reaches: it validates at the start and after the last step."""


@dataclass(frozen=True)  # without slots: users save `config.__dict__`
class TrainingConfig:
    """The most common settings of a run.

    Args:
        total_epochs: Passes over the prompts.
        total_steps: Number of steps, instead of epochs.
        batch_size: Prompts per step.
        group_size: Responses per prompt; by default 8 for GRPO and 1 for PPO.
        learning_rate: Learning rate of the policy.
        ppo_epochs: Passes over the responses of a step.
        clip_range: Clipping of the policy ratio.
        kl_coef: Weight of the KL divergence from the initial model; 0 disables it.
        max_prompt_length: Longest prompt, in tokens.
        max_response_length: Longest response, in tokens.
        temperature: Sampling temperature.
        devices: Number of training devices; by default the GPUs of this machine, or one process on its CPU.
        seed: Seed of the run.
        settings: All other settings by name, as `verl config` lists them.

    >>> TrainingConfig(batch_size=64, settings={"actor_rollout_ref.actor.entropy_coeff": 0.01})
    """

    total_epochs: int = 1
    total_steps: int | None = None
    batch_size: int = 8
    group_size: int | None = None
    learning_rate: float = 1e-6
    ppo_epochs: int = 1
    clip_range: float = 0.2
    kl_coef: float = 0.0
    max_prompt_length: int = 512
    max_response_length: int = 512
    temperature: float = 1.0
    devices: int | None = None
    seed: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The metrics of every step, and the path of the trained model."""

    metrics: list[dict[str, Any]]
    model_path: Path  # a Hugging Face model folder

    @property
    def rewards(self) -> list[float]:
        """The mean reward of every step."""
        return [step["reward/mean"] for step in self.metrics if "reward/mean" in step]


Training = TrainResult
"""The former name of `TrainResult`."""


class _Trainer:
    """What the trainers share; each names the settings of its algorithm."""

    _estimator: str
    _group_size: int
    _kl_switch: str
    _kl_coef: str

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        config: TrainingConfig | None = None,
        *,
        reward: Reward | str | Path | None = None,
        prompts: Prompts | None = None,
        validation: Prompts | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        environment: Callable[[], Any] | str | None = None,
        agent: Callable[..., Any] | str | None = None,
        folder: str | Path = "verl-run",
        local: bool = False,
    ) -> None:
        """Create a trainer; nothing starts before `train()`.

        Args:
            model: Name, path or transformers object. An object holds the trained weights after `train()`.
            tokenizer: Name, path or transformers object; by default that of the model.
            config: Settings of the run.
            reward: Function, or path of a file with `compute_score`. Its parameters are chosen by name from `prompt`,
                `response`, `ground_truth`, `data_source` and `extra_info`; it returns a number, or a dict with a
                "score". By default the built-in scorer of each row's data source.
            prompts: Texts, conversations, rows with a "prompt", a dataset or DataLoader of these, or the path of a
                file.
            validation: Prompts to validate on before and after training.
            tools: Functions that the model may call, with or without `@verl.tool`.
            environment: Class that each episode plays against, with `reset`, `step` and maybe `close`.
            agent: Coroutine function that plays an episode: `agent(task, model)`, or `agent(task, base_url, api_key)`.
            folder: Folder for everything that the run writes. If another run has saved in it, this one writes to the
                first free one of `folder-2`, `folder-3`, ..., unless it resumes (`trainer.resume_mode`).
            local: Run in this process, without Ray, so that breakpoints work.
        """
        self.model, self.tokenizer, self.config = model, tokenizer, config or TrainingConfig()
        self.reward, self.prompts, self.validation = reward, prompts, validation
        self.tools, self.environment, self.agent = tools, environment, agent
        self.folder, self.local = Path(folder), local

    def train(self, prompts: Prompts | None = None) -> TrainResult:
        """Train to the last step.

        Args:
            prompts: Prompts to train on, instead of those given to the constructor.

        Returns:
            The metrics of every step, and the path of the trained model.

        Raises:
            ConfigError: With all problems of the settings, before anything starts.
        """
        try:
            return self._train(self.prompts if prompts is None else prompts)
        except (ConfigError, DataError, RewardError) as error:  # the user's mistake: their line and the message
            raise error.with_traceback(None) from None

    def _train(self, prompts: Prompts | None) -> TrainResult:
        if prompts is None:
            raise ConfigError(["prompts: must be given, to the trainer or to train(prompts)"])
        console = Console()
        folder = self._choose_folder(console)
        with console.stage("writing prompts and checking settings", is_logged=False):
            loaded = self._load(prompts, folder)
        console.hints(loaded.hints)
        reward = self.reward if callable(self.reward) else None
        resume = f'folder="{folder}" and TrainingConfig(settings={{"trainer.resume_mode": "auto"}})'
        try:
            code = _run_to_end(train(loaded.config, console, reward, origins=loaded.origins))
        except KeyboardInterrupt:
            console.note(describe_stop(folder, resume))
            raise
        if code:
            said = describe_stop(folder, resume)
            raise EngineError(f"the run stopped before its last step (exit code {code}): {said}")
        result = _read_result(folder)
        console.note(describe_end(loaded.config, resume))
        if not isinstance(self.model, str | Path):
            trained = type(self.model).from_pretrained(result.model_path, dtype=self.model.dtype)
            self.model.load_state_dict(trained.state_dict())
        return result

    def _choose_folder(self, console: Console) -> Path:
        """Return the run's folder, which is made: that of another run only if the settings say to resume."""
        settings = self.config.settings
        mode, path = settings.get("trainer.resume_mode", "disable"), settings.get("trainer.resume_from_path")
        folder = self.folder if continues_in(self.folder, mode, path) else find_free_folder(self.folder)
        if folder != self.folder:
            console.note(f"{self.folder} holds the checkpoints of another run, which are kept: this run uses {folder}")
        try:
            make_folder(folder)
        except OSError as error:
            raise ConfigError([f"folder={folder}: cannot be made ({error.strerror}); choose another one"]) from error
        return folder

    def _load(self, prompts: Prompts, folder: Path) -> LoadedConfig:
        tree: dict[str, Any] = {}
        for key, value in {**self._settings(prompts, folder), **self.config.settings}.items():
            set_path(tree, tuple(key.split(".")), value)
        loaded = load_dict(tree)
        trainer = loaded.config.trainer
        if trainer.save_freq == -1 or not trainer.save_hf:
            raise ConfigError(
                ["settings: the trained model is read from the last checkpoint; remove trainer.save_freq, save_hf"]
            )
        return loaded

    def _settings(self, prompts: Prompts, folder: Path) -> dict[str, Any]:
        config, uses_kl = self.config, self.config.kl_coef > 0
        if not isinstance(self.model, str | Path):
            check_model_object(self.model)
        validation = None if self.validation is None else write_rows(self.validation, folder / "validation.jsonl")
        return {
            "data.train_files": write_rows(
                prompts, folder / "prompts.jsonl", config.total_steps and config.total_steps * config.batch_size
            ),
            "data.val_files": validation,
            **({} if validation is None else {"trainer.test_freq": ONLY_AT_END}),
            "data.train_batch_size": config.batch_size,
            "data.max_prompt_length": config.max_prompt_length,
            "data.max_response_length": config.max_response_length,
            "actor_rollout_ref.model.path": _save(self.model, folder / "model"),
            "actor_rollout_ref.model.tokenizer_path": _save(self._find_tokenizer(), folder / "tokenizer"),
            "actor_rollout_ref.actor.optim.lr": config.learning_rate,
            "actor_rollout_ref.actor.ppo_mini_batch_size": config.batch_size,
            "actor_rollout_ref.actor.ppo_epochs": config.ppo_epochs,
            "actor_rollout_ref.actor.clip_ratio": config.clip_range,
            "actor_rollout_ref.rollout.name": IN_PROCESS_ENGINE if self.local else DEFAULT_ENGINE,
            "actor_rollout_ref.rollout.temperature": config.temperature,
            **({"trainer.total_epochs": config.total_epochs} if config.total_steps is None else {}),
            "trainer.total_training_steps": config.total_steps,
            "trainer.n_gpus_per_node": _count_devices() if config.devices is None else config.devices,
            "trainer.local": self.local,
            "trainer.seed": config.seed,
            "trainer.save_freq": None,  # after the last step
            "trainer.save_hf": True,
            "trainer.resume_mode": "disable",
            "trainer.default_local_dir": str(folder),
            **_reward_settings(self.reward),
            **_agent_settings(self.tools, self.environment, self.agent, folder),
            "algorithm.adv_estimator": self._estimator,
            "actor_rollout_ref.rollout.n": config.group_size or self._group_size,
            self._kl_switch: uses_kl,
            **({self._kl_coef: config.kl_coef} if uses_kl else {}),
        }

    def _find_tokenizer(self) -> str | Path | PreTrainedTokenizerBase | None:
        """Return the tokenizer; for a model object, which is saved without one, that of the model."""
        if isinstance(self.model, str | Path) or isinstance(self.tokenizer, str | Path):
            return self.tokenizer
        return find_tokenizer(self.model, self.tokenizer)


class GRPOTrainer(_Trainer):
    """Trainer for GRPO: responses to the same prompt are compared with each other, without a critic."""

    _estimator, _group_size = "grpo", 8
    _kl_switch, _kl_coef = "actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_coef"


class PPOTrainer(_Trainer):
    """Trainer for PPO: responses are compared with the values of a critic of the same architecture."""

    _estimator, _group_size = "gae", 1
    _kl_switch, _kl_coef = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"


def _read_result(folder: Path) -> TrainResult:
    """Return the result of the run that has just ended, never that of an earlier run in the same folder."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    last, saved = max((step["step"] for step in metrics), default=0), CheckpointDir(folder).latest()
    if saved != last:
        raise CheckpointError(
            f"{folder}: the run ended after step {last}, but the last checkpoint is of step {saved}; the trained model "
            "was not saved"
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


def _agent_settings(
    tools: Sequence[Callable[..., Any]],
    environment: Callable[[], Any] | str | None,
    agent: Callable[..., Any] | str | None,
    folder: Path,
) -> dict[str, Any]:
    """Return the settings of episodes with several turns. Objects are written to a file, which workers load."""
    if not tools and environment is None and agent is None:
        return {}
    file = folder.resolve() / f"agents{PICKLE}"
    given = {"environment": environment, "agent": agent}
    objects: dict[str, Any] = {name: value for name, value in given.items() if callable(value)}
    names = {name: f"{file}:{name}" if name in objects else value for name, value in given.items()}
    if tools:
        objects["tools"] = list(tools)
    try:
        pickled = pickle_by_value(objects, [*tools, *objects.values()])
    except Exception as error:
        raise ConfigError([f"{', '.join(objects)}: cannot be sent to the workers: {error}"]) from error
    create_private_file(file)
    file.write_bytes(pickled)
    rollout = "actor_rollout_ref.rollout"
    return {
        f"{rollout}.multi_turn.enable": True,
        **({f"{rollout}.multi_turn.function_tool_path": str(file)} if tools else {}),
        **({f"{rollout}.multi_turn.environment": names["environment"]} if environment is not None else {}),
        **({f"{rollout}.agent.default_agent_loop": names["agent"]} if agent is not None else {}),
    }


def _save(model: Any, folder: Path) -> str | None:
    """Return a name or path as it is; save an object of transformers to `folder` and return that."""
    if model is None or isinstance(model, str | Path):
        return None if model is None else str(model)
    model.save_pretrained(folder)
    return str(folder)


def _count_devices() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def _run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; in a thread if this one has an event loop, as notebooks have."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        run: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run
    else:
        run = _run_in_thread
    return run(work)  # outside of the handler: the error of `get_running_loop` would begin the traceback of any other


def _run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def register_and_run() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        return await work

    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(asyncio.run, register_and_run())
        try:
            return future.result()
        except KeyboardInterrupt:  # cancel the run as in a terminal; leaving the executor waits for it
            for loop, task in running:
                loop.call_soon_threadsafe(task.cancel)
            raise
