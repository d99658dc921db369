"""Settings and environment of a run, written to its folder whenever the run starts or resumes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any

from verl.cluster.environment import collect_report
from verl.config.render import render, render_json
from verl.config.schema import Config, SftConfig
from verl.redaction import redact
from verl.tracking.console import Console
from verl.tracking.sinks import KEEP_ALL, open_record


async def record_start(
    config: Config | SftConfig,
    origins: Mapping[str, str],
    version: int,
    total_steps: int,
    console: Console,
    resolved: Mapping[str, Any] | None = None,
) -> None:
    """Write `settings.yaml`, which can be loaded again, and a line of `starts.jsonl`. Secrets are hidden in both.

    Args:
        config: The settings of the run.
        origins: Where given settings come from, by key.
        version: The version of the weights that the run starts with.
        total_steps: The number of steps after which the run ends.
        console: Reports a disk that cannot be written; the run goes on.
        resolved: What this start has chosen for settings that leave it open.
    """
    folder = config.trainer.checkpoint_dir
    record = {
        "total_steps": total_steps,
        "command": " ".join(map(redact, sys.argv)),
        "settings": render_json(config, only_changed=True, origins=origins),
        "resolved": dict(resolved or {}),
        "environment": await asyncio.to_thread(collect_report),
    }
    starts = open_record("starts", folder, KEEP_ALL, console)
    starts.log(record, version)
    starts.close()
    path = folder / "settings.yaml"
    try:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(render(config, origins=origins), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        console.advice(f"{path}: cannot be written: {error.strerror}")
