"""A sandbox on other machines, by URL: one request to SandboxFusion's `/run_code` for each program.

What the service does about isolation is its own affair; what it cannot do (no answer, its own error) is a RewardError,
and says nothing about the program.
"""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from verl.errors import RewardError
from verl.rewards.sandbox.sandbox import Limits, ProgramResult

__all__ = ["run"]

_COMPILE_SECONDS, _QUEUE_SECONDS, _TRIES = 10.0, 60.0, 3
_BUSY = (429, 500, 502, 503, 504)


def run(
    source: str,
    *,
    url: str,
    stdin: str = "",
    files: Mapping[str, str | bytes] | None = None,
    limits: Limits | None = None,
) -> ProgramResult:
    """The outcome of `source` as a Python program at the service; like `sandbox.run`."""
    limits = limits or Limits()
    asked = {
        "code": source,
        "language": "python",
        "stdin": stdin,
        "compile_timeout": _COMPILE_SECONDS,
        "run_timeout": limits.seconds,
        "memory_limit_MB": limits.memory_bytes >> 20,
        "files": {name: _base64(content) for name, content in (files or {}).items()},
    }
    told = _post(f"{url.removesuffix('/').removesuffix('/run_code')}/run_code", asked, limits.seconds)
    result = told.get("run_result") or told.get("compile_result")
    if told.get("status") == "SandboxError" or not result or result.get("status") == "Error":
        raise RewardError(f"sandbox at {url}: could not run a program: {str(told.get('message') or told)[:300]}")
    stdout, stderr = ((result.get(name) or "")[: limits.output_bytes] for name in ("stdout", "stderr"))
    late = result["status"] == "TimeLimitExceeded"
    code = None if late else result.get("return_code")
    status = "timeout" if late else "ok" if code == 0 else "killed" if code is None or code < 0 else "error"
    return ProgramResult(status, code, stdout, stderr, float(result.get("execution_time") or 0.0))


def _base64(content: str | bytes) -> str:
    return base64.b64encode(content.encode() if isinstance(content, str) else content).decode()


def _post(url: str, asked: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The service's answer. One that is busy or away is asked again, twice."""
    body = json.dumps(asked).encode()
    call = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    for attempt in range(1, _TRIES + 1):
        try:
            with urllib.request.urlopen(call, timeout=seconds + _COMPILE_SECONDS + _QUEUE_SECONDS) as answer:
                told = json.load(answer)
            if isinstance(told, dict):
                return told
            why = f"answered {str(told)[:100]!r}, which is no JSON object"
        except urllib.error.HTTPError as error:
            why = f"answered HTTP {error.code}: {error.read()[:200].decode(errors='replace')}"
            if error.code not in _BUSY:
                break
        except (OSError, ValueError) as error:
            why = f"gave no answer: {error}"
        if attempt < _TRIES:
            time.sleep(attempt)
    raise RewardError(f"sandbox at {url}: {why}; check reward.sandbox.url, and that the service runs")
