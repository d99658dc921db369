"""Remote sandbox: sends each program to the `/run_code` endpoint of a SandboxFusion service.

Errors of the service are a RewardError; they are not the program's fault.
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

_COMPILE_SECONDS, _QUEUE_SECONDS, _ATTEMPTS = 10.0, 60.0, 3
_RETRYABLE = (429, 500, 502, 503, 504)


def run(
    source: str,
    *,
    url: str,
    stdin: str = "",
    files: Mapping[str, str | bytes] | None = None,
    limits: Limits | None = None,
) -> ProgramResult:
    """Run `source` as a Python program at the service; like `sandbox.run`."""
    limits = limits or Limits()
    payload = {
        "code": source,
        "language": "python",
        "stdin": stdin,
        "compile_timeout": _COMPILE_SECONDS,
        "run_timeout": limits.seconds,
        "memory_limit_MB": limits.memory_bytes >> 20,
        "files": {name: _base64(content) for name, content in (files or {}).items()},
    }
    reply = _post(f"{url.removesuffix('/').removesuffix('/run_code')}/run_code", payload, limits.seconds)
    result = reply.get("run_result") or reply.get("compile_result")
    if reply.get("status") == "SandboxError" or not result or result.get("status") == "Error":
        raise RewardError(f"sandbox at {url}: could not run a program: {str(reply.get('message') or reply)[:300]}")
    stdout, stderr = ((result.get(name) or "")[: limits.output_bytes] for name in ("stdout", "stderr"))
    timed_out = result["status"] == "TimeLimitExceeded"
    code = None if timed_out else result.get("return_code")
    status = "timeout" if timed_out else "ok" if code == 0 else "killed" if code is None or code < 0 else "error"
    return ProgramResult(status, code, stdout, stderr, float(result.get("execution_time") or 0.0))


def _base64(content: str | bytes) -> str:
    return base64.b64encode(content.encode() if isinstance(content, str) else content).decode()


def _post(url: str, payload: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the reply of the service; retry if it is busy or unreachable."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=json.dumps(payload).encode(), headers=headers)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with urllib.request.urlopen(request, timeout=seconds + _COMPILE_SECONDS + _QUEUE_SECONDS) as response:
                reply = json.load(response)
            if isinstance(reply, dict):
                return reply
            problem = f"replied {str(reply)[:100]!r}, which is not a JSON object"
        except urllib.error.HTTPError as error:
            problem = f"returned HTTP {error.code}: {error.read()[:200].decode(errors='replace')}"
            if error.code not in _RETRYABLE:
                break
        except (OSError, ValueError) as error:
            problem = f"did not reply: {error}"
        if attempt < _ATTEMPTS:
            time.sleep(attempt)
    raise RewardError(f"sandbox at {url}: {problem}; check reward.sandbox.url, and that the service runs")
