"""Where tools come from: functions in a file, classes and servers in a YAML file, a server by its URL.

A source opens the tools of an episode, and closes them when the episode ends.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from verl.agents.tools.function_tools import FunctionTool, Tool
from verl.agents.tools.results import ToolResult, to_result
from verl.agents.tools.servers import load_mcp_servers, load_tool_server
from verl.agents.user_code import UserCode, call_method, close_quietly, run_with_timeout
from verl.config.schema.rollout import MultiTurnConfig
from verl.custom_functions import PICKLE, load_file, load_function, load_pickle
from verl.errors import ConfigError

SETTING = "actor_rollout_ref.rollout.multi_turn"
_RELEASE_S = 60.0


class ToolSource(Protocol):
    """Opens the tools of an episode on a row, and lists the schemas that the model sees."""

    def open(self, row: Mapping[str, Any]) -> AbstractAsyncContextManager[Sequence[Tool]]: ...

    def list_schemas(self) -> Sequence[Mapping[str, Any]]: ...


class FunctionSource:
    """Functions that are tools."""

    def __init__(self, tools: Sequence[FunctionTool]) -> None:
        self._tools = tools

    @asynccontextmanager
    async def open(self, row: Mapping[str, Any]) -> AsyncIterator[Sequence[Tool]]:
        yield [tool.bind(row) for tool in self._tools]

    def list_schemas(self) -> Sequence[Mapping[str, Any]]:
        return [tool.schema for tool in self._tools]


class ClassTool:
    """A tool class with `create`, `execute` and `release`. Created once per episode, at its first call."""

    def __init__(self, instance: Any, schema: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
        self._tool, self.schema, self._kwargs = instance, schema, kwargs
        self.code = UserCode(type(instance))
        self._id: str | None = None

    async def call(self, arguments: Mapping[str, Any], timeout_s: float) -> ToolResult:
        return await run_with_timeout(self.code.run(self._call, arguments), timeout_s, type(self._tool).__name__)

    async def _call(self, arguments: Mapping[str, Any]) -> ToolResult:
        if self._id is None:
            self._id = uuid.uuid4().hex
            await call_method(self._tool.create, self._id, **self._get_kwargs("create"))
        result = await call_method(self._tool.execute, self._id, dict(arguments), **self._get_kwargs("execute"))
        if isinstance(result, tuple):  # (response, reward, metrics)
            return ToolResult(to_result(result[0]).text, float(result[1] or 0.0))
        return to_result(result)

    async def close(self) -> None:
        if self._id is not None:
            kwargs = self._get_kwargs("release")
            await close_quietly(self.code, self._tool.release, self._id, timeout_s=_RELEASE_S, **kwargs)

    def _get_kwargs(self, method: str) -> dict[str, Any]:
        return dict(self._kwargs.get(f"{method}_kwargs") or {})


class ClassSource:
    """A tool class of a YAML file: `class_name`, `config` and `tool_schema`."""

    def __init__(self, spec: Mapping[str, Any], where: str) -> None:
        try:
            module, _, name = str(spec["class_name"]).rpartition(".")
            cls: Any = load_function(f"{module}:{name}", {}, where)
        except (KeyError, ValueError) as error:
            raise ConfigError([f"{where}: a tool cannot be loaded: {error}"]) from error
        self._tool = cls(config=dict(spec.get("config") or {}), tool_schema=spec.get("tool_schema"))
        schema = spec.get("tool_schema") or getattr(self._tool, "tool_schema", None)
        if schema is None:
            raise ConfigError([f"{where}: {spec['class_name']} has no tool_schema; add one to the file"])
        self._schema: Mapping[str, Any] = schema
        self.name = schema["function"]["name"]

    @asynccontextmanager
    async def open(self, row: Mapping[str, Any]) -> AsyncIterator[Sequence[Tool]]:
        kwargs = ((row.get("extra_info") or {}).get("tools_kwargs") or {}).get(self.name) or {}
        tool = ClassTool(self._tool, self._schema, kwargs)
        async with tool.code:
            try:
                yield [tool]
            finally:
                await tool.close()

    def list_schemas(self) -> Sequence[Mapping[str, Any]]:
        return [self._schema]


def load_sources(settings: MultiTurnConfig) -> list[ToolSource]:
    """Load everything that the settings name."""
    sources: list[ToolSource] = []
    if settings.function_tool_path is not None:
        sources.append(FunctionSource(load_functions(settings.function_tool_path)))
    if settings.tool_config_path is not None:
        sources += load_tool_file(settings.tool_config_path)
    if settings.tool_server is not None:
        sources.append(load_tool_server(settings.tool_server, f"{SETTING}.tool_server"))
    names = [schema["function"]["name"] for source in sources for schema in source.list_schemas()]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError([f"{SETTING}: there are two tools {twice[0]!r}; rename one"])
    return sources


def load_functions(path: str) -> list[FunctionTool]:
    """Return all `@verl.tool` functions of a Python file."""
    key = f"{SETTING}.function_tool_path"
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError([f"{key}: there is no file {path}; set it to a Python file with @verl.tool functions"])
    if file.suffix == PICKLE:
        return [each if isinstance(each, FunctionTool) else FunctionTool(each) for each in load_pickle(file)["tools"]]
    try:
        module = load_file(file)
    except Exception as error:  # the user's code
        raise ConfigError(
            [f"{key}: {path} cannot be imported: {type(error).__name__}: {error}; fix the file"]
        ) from error
    found = [value for value in vars(module).values() if isinstance(value, FunctionTool)]
    if not found:
        raise ConfigError([f"{key}: {path} has no tools; put @verl.tool above each function that is a tool"])
    return found


def load_tool_file(path: str) -> list[ToolSource]:
    import yaml

    key = f"{SETTING}.tool_config_path"
    file = Path(path).expanduser()
    try:
        content = yaml.safe_load(file.read_text())
        specs = content["tools"]
    except OSError as error:
        raise ConfigError([f"{key}: {path} cannot be read: {error}"]) from error
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError([f"{key}: {path} has no list of tools: {error}; see docs/agents.md"]) from error
    sources: list[ToolSource] = []
    for spec in specs:
        kind = (spec.get("config") or {}).get("type", "native")
        if kind == "mcp":
            sources += load_mcp_servers(spec, f"{key}={path}", file.parent)
        elif kind == "native":
            sources.append(ClassSource(spec, f"{key}={path}"))
        else:
            raise ConfigError([f"{key}: {path} has a tool of type {kind!r}; set config.type to native or mcp"])
    return sources
