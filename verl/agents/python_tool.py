"""A Python interpreter as a tool: programs of the model run in the sandbox, each in a fresh one.

Import it in the file of `multi_turn.function_tool_path`, next to your own tools, or pass it to a trainer.
"""

from __future__ import annotations

from verl.agents.errors import ToolError
from verl.agents.tools.function_tools import tool
from verl.agents.user_code import run_in_thread
from verl.rewards.sandbox import sandbox

LIMITS = sandbox.Limits(output_bytes=64 << 10)


@tool
async def python(code: str) -> str:
    """Run a Python program and return what it prints. Nothing is kept between programs.

    Args:
        code: The program. It must print its results.
    """
    result = await run_in_thread(lambda: sandbox.run(code, limits=LIMITS))
    if result.status == "ok":
        return result.stdout or "(no output)"
    reason = result.stderr.strip() if result.status == "error" else f"the program was ended: {result.status}"
    raise ToolError("\n".join(filter(None, [result.stdout.strip(), reason])))
