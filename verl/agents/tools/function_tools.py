"""Tools that a model may call: functions of the user, described by their signature and docstring.

    @verl.tool
    async def lookup(key: str, *, row) -> str:
        \"\"\"Return the value of a key.

        Args:
            key: The name of the value.
        \"\"\"
        return row["extra_info"]["values"][key]

The model sees the name, the description and the arguments. A keyword-only parameter `row` is hidden from the model: it
receives the row of the data, so that every episode may have its own answers.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from verl.agents.errors import ToolError, classify_error
from verl.agents.tools.processes import call_in_process
from verl.agents.tools.results import ToolResult, to_result
from verl.agents.user_code import UserCode, run_with_timeout

HIDDEN = "row"  # the parameter that the model does not see
_ARGUMENT = re.compile(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.+)$")


class Tool(Protocol):
    """A tool of one episode: its JSON schema for the model, and a call."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """`{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`."""
        ...

    async def call(self, arguments: Mapping[str, Any], timeout_s: float) -> ToolResult:
        """Run the tool. Raise `ToolError` for wrong arguments, `ToolFailureError` for a failure or a timeout."""
        ...


class FunctionTool:
    """A function as a tool. Calling the tool object calls the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._row = function, dict[str, Any]()
        self._arguments = _build_arguments(function)
        description, _ = _read_docstring(function)
        parameters = self._arguments.model_json_schema()
        parameters.pop("title", None)
        for each in parameters.get("properties", {}).values():
            each.pop("title", None)
        self.name = function.__name__
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": parameters},
        }
        functools.update_wrapper(self, function)

    def __reduce__(self) -> tuple[Any, ...]:
        return FunctionTool, (self._function,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def bind(self, row: Mapping[str, Any]) -> FunctionTool:
        """Return the tool of an episode on this row."""
        bound = copy.copy(self)
        bound._row = dict(row)
        return bound

    async def call(self, arguments: Mapping[str, Any], timeout_s: float) -> ToolResult:
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            raise ToolError(_describe_mistakes(self.name, error)) from None
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        if HIDDEN in inspect.signature(self._function).parameters:
            values[HIDDEN] = self._row
        if inspect.iscoroutinefunction(self._function):
            async with UserCode(self._function) as code:
                return await run_with_timeout(code.run(self._await_result, values), timeout_s, self.name)
        return await call_in_process(self._function, values, timeout_s)

    async def _await_result(self, values: Mapping[str, Any]) -> ToolResult:
        return to_result(await self._function(**values))


def tool(function: Callable[..., Any]) -> FunctionTool:
    """Make a function a tool. The model sees its name, annotations and docstring."""
    return FunctionTool(function)


def _build_arguments(function: Callable[..., Any]) -> type[BaseModel]:
    _, descriptions = _read_docstring(function)
    fields: dict[str, Any] = {}
    hints = inspect.get_annotations(function, eval_str=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if name == HIDDEN and parameter.kind is parameter.KEYWORD_ONLY:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"the tool {function.__name__} takes *{name}; declare each argument by name")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints.get(name, str), Field(default, description=descriptions.get(name)))
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the description of a function, and those of its arguments from an `Args:` section."""
    text = inspect.getdoc(function) or ""
    description, _, rest = text.partition("Args:")
    section, _, _ = rest.partition("Returns:")
    found = (_ARGUMENT.match(line) for line in section.splitlines())
    return " ".join(description.split()), {match[1]: match[2].strip() for match in found if match}


def _describe_mistakes(name: str, error: ValidationError) -> str:
    problems = "; ".join(
        f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}" for each in error.errors()[:4]
    )
    return f"the arguments of {name} are wrong: {problems}"


async def call_tool(
    tools: Mapping[str, Tool], name: str, arguments: Mapping[str, Any], timeout_s: float
) -> ToolResult | ToolError:
    """Call a tool, and return errors that the model made.

    Raises:
        ToolFailureError: If the call fails or exceeds the timeout.
    """
    if name not in tools:
        return ToolError(f"there is no tool {name!r}; there are: {', '.join(sorted(tools)) or 'none'}")
    try:
        return await tools[name].call(arguments, timeout_s)
    except Exception as error:
        if isinstance(result := classify_error(error), ToolError):
            return result
        raise result from error
