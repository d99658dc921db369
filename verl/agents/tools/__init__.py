"""Tools that a model may call: functions, classes, MCP and JSON servers. Imported by agents of the package above."""

from verl.agents.tools.function_tools import FunctionTool, Tool, tool
from verl.agents.tools.results import ToolResult

__all__ = ["FunctionTool", "Tool", "ToolResult", "tool"]
