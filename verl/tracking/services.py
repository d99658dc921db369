"""Metric loggers of tracking services: Weights & Biases, MLflow, Trackio, SwanLab.

Each is a thin adapter of the package's documented interface; the package is imported when the logger is opened. They
are tested against stand-ins with the documented signatures, not against the services.
"""

from __future__ import annotations

import re
import secrets
import string
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from verl.config.paths import format_value, iter_leaves, join_path
from verl.private_files import make_folder
from verl.tracking.sample_files import EPISODES
from verl.tracking.sink import FunctionSink, FunctionTableSink, RunInfo, Sink, Table

MLFLOW_PARAMS_AT_ONCE, MLFLOW_PARAM_LENGTH = 100, 6000  # limits of MLflow's server
SWANLAB_ID_LENGTH = 21  # letters and digits of a run's id


def open_wandb(run: RunInfo) -> Sink:
    """Log to Weights & Biases; a resumed run continues the last run of its folder."""
    import wandb

    with _outages_as_os_errors("CommError"):
        service = wandb.init(
            project=run.project,
            name=run.name,
            dir=run.folder,
            config=dict(run.settings),
            resume="auto" if run.resumed_step is not None else None,
            settings=wandb.Settings(https_proxy=run.wandb_proxy) if run.wandb_proxy else None,
        )

    def log_table(table: Table, step: int) -> None:
        columns = list(table.rows[0])
        rows = [[row[name] for name in columns] for row in table.rows]
        # A table is ready when later steps have been logged, and wandb drops what names an earlier step.
        shown = {table.name: wandb.Table(columns=columns, data=rows), f"{table.name}_step": step}
        service.log(shown, commit=False)

    return FunctionTableSink(lambda metrics, step: service.log(dict(metrics), step=step), service.finish, log_table)


def open_mlflow(run: RunInfo) -> Sink:
    """Log to the MLflow server or folder of MLFLOW_TRACKING_URI; a resumed run continues that of its folder.

    Settings become parameters, which MLflow does not change later.
    """
    import mlflow

    file = run.folder / "mlflow_run_id"
    with _outages_as_os_errors("MlflowException", "API request to "):
        client = mlflow.MlflowClient()
        if run.resumed_step is not None and file.exists():
            run_id = file.read_text(encoding="utf-8")
            client.update_run(run_id, status="RUNNING")
            experiment_id = client.get_run(run_id).info.experiment_id
        else:
            experiment_id = mlflow.set_experiment(experiment_name=run.project).experiment_id
            run_id = client.create_run(experiment_id, run_name=run.name).info.run_id
            params = (
                mlflow.entities.Param(_plain_name(join_path(path)), format_value(value)[:MLFLOW_PARAM_LENGTH])
                for path, value in iter_leaves(run.settings)
            )
            while chunk := list(islice(params, MLFLOW_PARAMS_AT_ONCE)):
                client.log_batch(run_id, params=chunk)
    _write(file, run_id)

    def log(metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        records = [
            mlflow.entities.Metric(_plain_name(name), float(value), now, step) for name, value in metrics.items()
        ]
        client.log_batch(run_id, metrics=records)

    def log_table(table: Table, step: int) -> None:
        if table.name == EPISODES:
            for row in table.rows:
                log_episode(row, step)
            return
        columns = {name: [row[name] for row in table.rows] for name in table.rows[0]}
        client.log_table(run_id, columns, artifact_file=f"{table.name}/step_{step}.json")

    def log_episode(row: Mapping[str, Any], step: int) -> None:
        """Log an episode as a trace with two spans, at the times that were recorded."""
        start, generated, end = (int(row[name] * 1e9) for name in ("started", "generated", "scored"))
        prompt, response, score = ({name: row[name]} for name in ("prompt", "response", "score"))
        tags = {"step": str(step)}
        tags |= {name: str(row[name]) for name in ("group", "index", "branch", "data_source", "finish_reason")}
        given = {"experiment_id": experiment_id, "run_id": run_id}
        trace = client.start_trace("episode", inputs=prompt, tags=tags, start_time_ns=start, **given)
        for name, begin, until, inputs, outputs in (
            ("generate", start, generated, prompt, response),
            ("score", generated, end, response | {"ground_truth": row["ground_truth"]}, score),
        ):
            span = client.start_span(name, trace.trace_id, trace.span_id, inputs=inputs, start_time_ns=begin)
            client.end_span(trace.trace_id, span.span_id, outputs=outputs, end_time_ns=until)
        client.end_trace(trace.trace_id, outputs=response | score, end_time_ns=end)

    return FunctionTableSink(log, lambda: client.set_terminated(run_id), log_table)


def open_trackio(run: RunInfo) -> Sink:
    """Log to Trackio, on this machine or to the Space of TRACKIO_SPACE_ID; a resumed run continues by its name."""
    import trackio

    resume = "never" if run.resumed_step is None else "allow"
    trackio.init(project=run.project, name=run.name, config=dict(run.settings), resume=resume)
    return FunctionSink(lambda metrics, step: trackio.log(dict(metrics), step=step), trackio.finish)


def open_swanlab(run: RunInfo) -> Sink:
    """Log to SwanLab; a resumed run continues that of its folder. SWANLAB_MODE=local writes to `swanlab/` only."""
    import swanlab

    file = run.folder / "swanlab_run_id"
    if run.resumed_step is None or not file.exists():
        letters = string.ascii_lowercase + string.digits
        _write(file, "".join(secrets.choice(letters) for _ in range(SWANLAB_ID_LENGTH)))
    logs = run.folder / "swanlab"
    make_folder(logs)
    swanlab.init(
        project=run.project,
        experiment_name=run.name,
        config=dict(run.settings),
        logdir=str(logs),
        id=file.read_text(encoding="utf-8"),
        resume="allow",
    )

    def log(metrics: Mapping[str, float], step: int) -> None:
        swanlab.log({_plain_name(name): float(value) for name, value in metrics.items()}, step=step)

    return FunctionSink(log, swanlab.finish)


@contextmanager
def _outages_as_os_errors(name: str, start: str = "") -> Iterator[None]:
    """Raise a package's own error about a service that cannot be reached as `ConnectionError`, which is retried."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ == name and str(error).startswith(start):
            raise ConnectionError(str(error)) from error
        raise


def _plain_name(name: str) -> str:
    """Return the name of a metric in characters that every service takes: `mean@1` is `mean_at_1`."""
    return re.sub(r"[^\w\-./ ]", "_", name.replace("@", "_at_"))


def _write(file: Path, text: str) -> None:
    make_folder(file.parent)
    file.write_text(text, encoding="utf-8")
