"""Runs an agent on a prompt as an episode, with a timeout, limits, and a second attempt after a failure."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.agents.adapters.blocking_agent import adapt_loop
from verl.agents.builtin_agents import (
    Agent,
    EnvironmentAgent,
    Task,
    ToolAgent,
    find_tool_problem,
    get_wanted_tools,
)
from verl.agents.chat_model import ChatModel
from verl.agents.clock import start_clock
from verl.agents.deterministic_batcher import Generate
from verl.agents.episode import single_turn
from verl.agents.errors import EpisodeLimitError, LoopBlockedError, ToolFailureError
from verl.agents.formats import FORMATS, detect_format
from verl.agents.formats.tool_calls import Parse
from verl.agents.gateway.agents import GatewayAgents
from verl.agents.messages import prepare_messages
from verl.agents.python_tool import python, start_interpreter
from verl.agents.rendering import ChatRenderer
from verl.agents.tools.sources import ToolSource, load_sources
from verl.agents.transcript import Transcript
from verl.agents.user_code import ends_in_time
from verl.config.batch_sizes import get_max_sequence_tokens
from verl.config.features import uses_reward_function
from verl.config.schema import Config
from verl.config.schema.conditions import ROLLOUT
from verl.custom_functions import load_function
from verl.data.chat import read_prompt
from verl.errors import ConfigError, DataError
from verl.redaction import redact
from verl.types import Failed, Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
BUILTIN_AGENTS = ("tool_agent", "single_turn", "environment")
ATTEMPTS = 2  # an episode is repeated if its tools or environment fail; a single call is never made twice


class AgentEpisode:
    """An `Episode` that an agent plays. Created once per worker. An `agent` replaces the one in the settings."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        agent: Callable[..., Any] | None = None,
    ) -> None:
        rollout = config.actor_rollout_ref.rollout
        self._settings, self._tokenizer = rollout.multi_turn, tokenizer
        self._max_sequence_tokens = get_max_sequence_tokens(config)
        self._renderer = ChatRenderer(tokenizer, config.data.apply_chat_template_kwargs)
        self._sources: list[ToolSource] = load_sources(self._settings)
        if python.schema in self.list_schemas():
            start_interpreter(config.reward.sandbox)  # reports a sandbox that fails before the first episode
        self._parse = choose_parser(self._settings.format, tokenizer, self._sources)
        has_reward = uses_reward_function(config) or config.reward.reward_model.enable
        self._gateway = GatewayAgents(rollout, accepts_rewards=not has_reward)
        self._agents: dict[str, Agent] = {"tool_agent": ToolAgent(self._settings, self._sources)}
        self._default = rollout.agent.default_agent_loop
        if agent is not None:
            self._agents[self._default] = self._gateway.adapt(agent)
        if self._default not in (*self._agents, "single_turn"):
            self._agents[self._default] = self._load_agent(self._default, f"{ROLLOUT}.agent.default_agent_loop")
        for name, path in rollout.agent.agents.items():
            if name in BUILTIN_AGENTS:
                raise ConfigError([f"{ROLLOUT}.agent.agents: {name} is a built-in agent; choose another name"])
            self._agents[name] = self._load_agent(path, f"{ROLLOUT}.agent.agents.{name}")
        if self._settings.environment is not None:
            make = load_agent(self._settings.environment, f"{ROLLOUT}.multi_turn.environment")
            self._agents["environment"] = EnvironmentAgent(self._settings, make)
            self._default = "environment"

    def list_schemas(self) -> list[dict[str, Any]]:
        return [dict(schema) for source in self._sources for schema in source.list_schemas()]

    def find_problem(self, raw: Any, extra_info: Mapping[str, Any]) -> str | None:
        """Return why a row of the data cannot be played: its agent, prompt or tools; None if it can.

        A row only chooses among the agents and tools of the settings: a name in the data never loads code.
        """
        name = self.get_agent_name(extra_info)
        if name == "single_turn":
            return None
        if not isinstance(name, str) or name not in self._agents:
            known = ", ".join(dict.fromkeys(["single_turn", *self._agents]))
            fix = f"use one of {known}, or declare it in {ROLLOUT}.agent.agents"
            return f"the column agent_name is {str(name)[:80]!r}, which the settings do not declare; {fix}"
        if isinstance(raw, str):
            return (
                f"the prompt is text, but {ROLLOUT}.multi_turn.enable=true needs chat messages; write "
                'each prompt as [{"role": "user", "content": "..."}]'
            )
        return find_tool_problem(self.list_schemas(), extra_info) if name == "tool_agent" else None

    def get_agent_name(self, extra_info: Mapping[str, Any]) -> Any:
        """Return what a row names as its agent; the default if it names none."""
        return extra_info.get("agent_name") or self._default

    @property
    def has_only_tools(self) -> bool:
        """Whether only tools answer the model: no environment, and no agent of the user."""
        return set(self._agents) <= {"tool_agent", "single_turn"}

    def check_tools_are_shown(self, raw: Any, extra_info: Mapping[str, Any]) -> None:
        """Raise a `ConfigError` if the rendered prompt of a row lacks a tool: the model would not know of it."""
        messages, wanted = read_prompt(raw), get_wanted_tools(extra_info)
        schemas = {schema["function"]["name"]: schema for schema in self.list_schemas()}
        names = list(schemas) if wanted is None else list(wanted)
        if isinstance(messages, str):
            return
        text = self._renderer.render_text(prepare_messages(messages), [schemas[name] for name in names])
        if hidden := [name for name in names if name not in text]:
            model = self._tokenizer.name_or_path or "the tokenizer"
            raise ConfigError(
                [
                    f"{ROLLOUT}.multi_turn: the chat template of {model} does not show the model its tools: "
                    f"{', '.join(hidden)}. Use a model whose chat template has tools, set chat_template of its "
                    "tokenizer to one that has, or describe each tool by its name in the system message of the prompts"
                ]
            )

    async def __call__(self, prompt: Prompt, generate: Generate, sampling: SamplingParams) -> Transcript:
        if problem := self.find_problem(prompt.raw, prompt.extra_info):
            raise DataError(f"row {prompt.row}: {problem}")
        name = str(self.get_agent_name(prompt.extra_info))
        if name == "single_turn":
            return await single_turn(prompt, generate, sampling)
        agent, task = self._agents[name], make_task(prompt)
        attempts = 0
        while attempts < ATTEMPTS:
            model = ChatModel(
                generate,
                self._renderer,
                sampling,
                self._parse,
                max_sequence_tokens=self._max_sequence_tokens,
                max_turns=self._settings.max_turns,
                branch_per_turn=self._settings.use_inference_chat_template,
            )
            try:
                transcript = await self._play(agent, task, model)
            except LoopBlockedError:  # whoever blocked the loop of this episode cannot do so again
                continue
            attempts += 1
            transcript.metrics |= {
                "episode/turns": float(len(transcript.turns)),
                "episode/attempts": float(attempts),
                "episode/truncated": float(transcript.is_truncated),
            }
            if transcript.failure is None:
                break
            transcript.score = None
            _log.warning("attempt %d of an episode failed: %s", attempts, redact(transcript.failure.message))
        return transcript

    async def close(self) -> None:
        await self._gateway.close()

    def _load_agent(self, path: str, setting: str) -> Agent:
        agent = load_agent(path, setting)
        return adapt_loop(agent, self._tokenizer, self._settings.max_turns) or self._gateway.adapt(agent)

    async def _play(self, agent: Agent, task: Task, model: ChatModel) -> Transcript:
        """Return the transcript of one attempt. Stop waiting for an agent that exceeds its timeout."""
        with start_clock() as clock:
            playing = asyncio.ensure_future(agent(task, model))
        # Nobody awaits an agent that exceeded its timeout.
        playing.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            is_done = await ends_in_time(playing, clock, self._settings.deadline_s)
        finally:
            playing.cancel()  # no effect once it is done
            model.close()
        transcript = model.transcript
        if not is_done:
            transcript.is_truncated = True
            transcript.metrics["episode/deadline_exceeded"] = 1.0
            if not transcript.turns:
                transcript.failure = Failed("timeout", f"no reply within {self._settings.deadline_s:g} s")
            return transcript
        name = getattr(agent, "__name__", type(agent).__name__)
        try:
            if (score := read_score(playing.result())) is not None:
                transcript.score = score
            if not transcript.turns:
                transcript.failure = Failed("error", f"the agent {name} ended without a reply of the model")
        except (ConfigError, LoopBlockedError):
            raise
        except EpisodeLimitError:
            transcript.is_truncated = True
            if not transcript.turns:
                transcript.failure = Failed("error", "the prompt leaves no tokens for a reply")
        except ToolFailureError as error:
            transcript.failure = Failed("error", str(error))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the user's agent
            transcript.failure = Failed("error", f"the agent {name} raised {type(error).__name__}: {error}")
        return transcript


def read_score(score: Any) -> float | None:
    """Return the score that an agent returned; raise `TypeError` if it is neither a finite number nor None."""
    if score is None:
        return None
    if not isinstance(score, (int, float)) or not math.isfinite(score):
        kind = type(score).__name__
        raise TypeError(f"the agent returned {kind}; return a finite number, or None to use the reward of the run")
    return float(score)


def make_task(prompt: Prompt) -> Task:
    messages = read_prompt(prompt.raw)
    assert not isinstance(messages, str)
    row = {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth, "extra_info": prompt.extra_info}
    return Task(messages, row)


def load_agent(name: str, setting: str) -> Callable[..., Any]:
    try:
        return load_function(name, {}, setting)
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def choose_parser(
    wanted: str | None, tokenizer: PreTrainedTokenizerBase, sources: Sequence[ToolSource]
) -> Parse | None:
    """Return the parser of the format that is wanted, or else of the chat template; None if no tool needs one."""
    key = f"{ROLLOUT}.multi_turn.format"
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    name = wanted or detect_format(template)
    if name is None and not sources:
        return None
    if name is None:
        raise ConfigError(
            [f"{key}: the chat template shows no known format of tool calls; set it to one of {', '.join(FORMATS)}"]
        )
    return FORMATS[name]
