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

from verl.config.paths import format_value, iter_leaves, join_path
from verl.private_files import make_folder
from verl.tracking.sink import RunInfo

MLFLOW_PARAMS_AT_ONCE, MLFLOW_PARAM_LENGTH = 100, 6000  # limits of MLflow's server
SWANLAB_ID_LENGTH = 21  # letters and digits of a run's id


class WandbSink:
    """Logs to Weights & Biases; a resumed run continues the last run of its folder."""

    def __init__(self, run: RunInfo) -> None:
        import wandb

        with _outages_as_os_errors("CommError"):
            self._run = wandb.init(
                project=run.project,
                name=run.name,
                dir=run.folder,
                config=dict(run.settings),
                resume="auto" if run.resumed_step is not None else None,
                settings=wandb.Settings(https_proxy=run.wandb_proxy) if run.wandb_proxy else None,
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """Logs to the MLflow server or folder of MLFLOW_TRACKING_URI; a resumed run continues that of its folder.

    Settings become parameters, which MLflow does not change later.
    """

    def __init__(self, run: RunInfo) -> None:
        import mlflow

        self._metric = mlflow.entities.Metric
        file = run.folder / "mlflow_run_id"
        with _outages_as_os_errors("MlflowException", "API request to "):
            self._client = mlflow.MlflowClient()
            if run.resumed_step is not None and file.exists():
                self._id = file.read_text(encoding="utf-8")
                self._client.update_run(self._id, status="RUNNING")
                return
            experiment = mlflow.set_experiment(experiment_name=run.project)
            self._id = self._client.create_run(experiment.experiment_id, run_name=run.name).info.run_id
            self._log_settings(run, mlflow.entities.Param)
        _write(file, self._id)

    def _log_settings(self, run: RunInfo, param: type) -> None:
        leaves = iter_leaves(run.settings)
        pairs = ((_plain_name(join_path(path)), format_value(value)[:MLFLOW_PARAM_LENGTH]) for path, value in leaves)
        while chunk := [param(*pair) for pair in islice(pairs, MLFLOW_PARAMS_AT_ONCE)]:
            self._client.log_batch(self._id, params=chunk)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        records = [self._metric(_plain_name(name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=records)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class TrackioSink:
    """Logs to Trackio, on this machine or to the Space of TRACKIO_SPACE_ID; a resumed run continues by its name."""

    def __init__(self, run: RunInfo) -> None:
        import trackio

        self._trackio = trackio
        resume = "never" if run.resumed_step is None else "allow"
        trackio.init(project=run.project, name=run.name, config=dict(run.settings), resume=resume)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


class SwanlabSink:
    """Logs to SwanLab; a resumed run continues that of its folder. SWANLAB_MODE=local writes to `swanlab/` only."""

    def __init__(self, run: RunInfo) -> None:
        import swanlab

        self._swanlab = swanlab
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

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log({_plain_name(name): float(value) for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._swanlab.finish()


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
