"""The contract of every metric logger, and what each service's package is called with.

The packages are not installed: stand-ins have the signatures of their documentation, and refuse all else.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recording_console import RecordingConsole

from verl.config.schema.trainer import RunConfig
from verl.tracking.buffered_sink import BufferedSink
from verl.tracking.sample_files import EPISODE_COLUMNS, EPISODES
from verl.tracking.services import open_wandb
from verl.tracking.sink import RunInfo, Sink, Table
from verl.tracking.sinks import open_sinks

pytestmark = pytest.mark.unit

Calls = list[tuple[str, Any]]


class StandIn:
    """A package that records its calls; `points` are the (metric, value, step) that its service would show."""

    def __init__(self) -> None:
        self.calls: Calls = []
        self.points: list[tuple[str, float, int]] = []
        self.error: Exception | None = None

    def record(self, name: str, given: Any = None) -> None:
        self.calls.append((name, given))
        if self.error is not None:
            raise self.error

    def add(self, metrics: dict[str, float], step: int | None) -> None:
        self.record("log")
        assert isinstance(metrics, dict)
        assert isinstance(step, int), "a step that is not given would be counted by the service"
        self.points += [(name, value, step) for name, value in metrics.items()]


def make_wandb(stand_in: StandIn) -> Any:
    class Run:
        def log(self, data, step=None, commit=None) -> None:
            if commit is False:
                stand_in.record("log_table", data)
            else:
                stand_in.add(data, step)

        def finish(self, exit_code=None, quiet=None) -> None:
            stand_in.record("finish")

    def init(entity=None, project=None, dir=None, name=None, config=None, resume=None, settings=None) -> Run:
        stand_in.record("init", {"project": project, "name": name, "config": config, "resume": resume})
        return Run()

    return SimpleNamespace(init=init, Settings=dict, Table=lambda columns=None, data=None: (columns, data))


def make_trackio(stand_in: StandIn) -> Any:
    def init(project, name=None, group=None, space_id=None, config=None, resume="never") -> None:
        assert resume in ("never", "allow", "must")
        stand_in.record("init", {"project": project, "name": name, "config": config, "resume": resume})

    def log(metrics: dict, step: int | None = None) -> None:
        stand_in.add(metrics, step)

    return SimpleNamespace(init=init, log=log, finish=lambda: stand_in.record("finish"))


def make_swanlab(stand_in: StandIn) -> Any:
    def init(project=None, experiment_name=None, config=None, logdir=None, mode=None, id=None, resume=None) -> None:
        assert resume in (None, True, False, "must", "allow", "never")
        assert re.fullmatch(r"[a-z0-9]{21}", id)
        assert Path(logdir).is_dir()
        stand_in.record("init", {"project": project, "name": experiment_name, "config": config, "id": id})

    def log(data: dict, step: int | None = None) -> None:
        assert all(re.fullmatch(r"[\w /.-]+", name) for name in data)
        stand_in.add(data, step)

    return SimpleNamespace(init=init, log=log, finish=lambda: stand_in.record("finish"))


def make_mlflow(stand_in: StandIn) -> Any:
    class Metric:
        def __init__(self, key, value, timestamp, step) -> None:
            assert re.fullmatch(r"[\w /.-]+", key)
            assert isinstance(timestamp, int)
            assert timestamp > 1e12, "milliseconds"
            self.key, self.value, self.step = key, value, step

    class Param:
        def __init__(self, key, value) -> None:
            assert isinstance(value, str)
            assert len(value) <= 6000
            self.key, self.value = key, value

    class MlflowClient:
        def create_run(self, experiment_id, start_time=None, tags=None, run_name=None) -> Any:
            stand_in.record("create_run", {"experiment": experiment_id, "name": run_name, "config": {}})
            return SimpleNamespace(info=SimpleNamespace(run_id=f"id-{len(stand_in.calls)}"))

        def get_run(self, run_id) -> Any:
            return SimpleNamespace(info=SimpleNamespace(experiment_id="7"))

        def update_run(self, run_id, status=None, name=None) -> None:
            stand_in.record("update_run", {"id": run_id, "status": status})

        def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None) -> None:
            assert len(params) <= 100
            assert len(metrics) <= 1000
            if params:
                stand_in.record("params", {param.key: param.value for param in params})
            else:
                stand_in.record("log", run_id)
            stand_in.points += [(metric.key, metric.value, metric.step) for metric in metrics]

        def log_table(self, run_id, data, artifact_file) -> None:
            stand_in.record("log_table", {artifact_file: data})

        def start_trace(self, name, inputs=None, tags=None, experiment_id=None, start_time_ns=None, run_id=None) -> Any:
            stand_in.record("start_trace", (name, inputs, tags, experiment_id, run_id, start_time_ns))
            return SimpleNamespace(trace_id="trace", span_id="root")

        def start_span(self, name, trace_id, parent_id, inputs=None, start_time_ns=None) -> Any:
            stand_in.record("start_span", (name, trace_id, parent_id, inputs, start_time_ns))
            return SimpleNamespace(trace_id=trace_id, span_id=name)

        def end_span(self, trace_id, span_id, outputs=None, end_time_ns=None) -> None:
            stand_in.record("end_span", (span_id, outputs, end_time_ns))

        def end_trace(self, trace_id, outputs=None, end_time_ns=None) -> None:
            stand_in.record("end_trace", (trace_id, outputs, end_time_ns))

        def set_terminated(self, run_id, status=None, end_time=None) -> None:
            stand_in.record("finish", run_id)

    def set_experiment(experiment_name=None, experiment_id=None) -> Any:
        stand_in.record("set_experiment", experiment_name)
        return SimpleNamespace(experiment_id="7")

    entities = SimpleNamespace(Metric=Metric, Param=Param)
    return SimpleNamespace(MlflowClient=MlflowClient, set_experiment=set_experiment, entities=entities)


PACKAGES: dict[str, Callable[[StandIn], Any]] = {
    "wandb": make_wandb,
    "mlflow": make_mlflow,
    "trackio": make_trackio,
    "swanlab": make_swanlab,
}


def make_tensorboard(stand_in: StandIn) -> Any:
    class SummaryWriter:
        def __init__(self, log_dir=None, purge_step=None) -> None:
            stand_in.record("init", {"dir": log_dir, "purge": purge_step})

        def add_scalar(self, tag, scalar_value, global_step=None) -> None:
            stand_in.add({tag: scalar_value}, global_step)

        def close(self) -> None:
            stand_in.record("finish")

    return SimpleNamespace(SummaryWriter=SummaryWriter)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], StandIn]:
    def install(name: str) -> StandIn:
        stand_in = StandIn()
        if name == "tensorboard":
            monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", make_tensorboard(stand_in))
        elif name in PACKAGES:
            monkeypatch.setitem(sys.modules, name, PACKAGES[name](stand_in))
        return stand_in

    return install


def open_one(name: str, folder: Path, resumed_step: int | None = None, console: Any = None) -> Sink:
    settings = {"data": {"seed": 1, "files": ["a", "b"]}, "judge": {"api_key": "plain-old-words"}}
    run = RunInfo(folder, "project", "name", settings=settings, resumed_step=resumed_step)
    return open_sinks([name], run, console or RecordingConsole())


def read_points(folder: Path) -> list[tuple[str, float, int]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(name, value, row["step"]) for row in rows for name, value in row.items() if name not in ("step", "time")]


LOGGERS = ["jsonl", "tensorboard", *PACKAGES]


def test_every_logger_of_the_settings_is_in_the_contract() -> None:
    names = set(RunConfig.model_fields["logger"].annotation.__args__[0].__args__)
    assert names == {*LOGGERS, "console", "none"}


@pytest.mark.parametrize("name", LOGGERS)
def test_every_metric_arrives_with_its_step_and_secrets_do_not(name: str, tmp_path: Path, installed) -> None:
    stand_in = installed(name)
    sink = open_one(name, tmp_path)
    sink.log({"reward/mean": 0.5, "actor/lr": 1e-6}, 1)
    sink.log({"val/addition/mean@1": 0.25}, 1)
    sink.log({"reward/mean": 0.75}, 2)
    sink.close()
    points = read_points(tmp_path) if name == "jsonl" else stand_in.points
    assert [(metric.replace("_at_", "@"), value, step) for metric, value, step in points] == [
        ("reward/mean", 0.5, 1),
        ("actor/lr", 1e-6, 1),
        ("val/addition/mean@1", 0.25, 1),
        ("reward/mean", 0.75, 2),
    ]
    assert "plain-old-words" not in repr(stand_in.calls)
    if name != "jsonl":
        assert [call for call, _ in stand_in.calls].count("finish") == 1


@pytest.mark.parametrize("name", [name for name in LOGGERS if name != "jsonl"])
def test_an_outage_does_not_end_the_run_and_loses_nothing(name: str, tmp_path: Path, installed, monkeypatch) -> None:
    stand_in, console = installed(name), RecordingConsole()
    sink = open_one(name, tmp_path, console=console)
    stand_in.error = RuntimeError("service is down")
    sink.log({"x": 1.0}, 1)
    stand_in.error = None
    sink.close()
    assert stand_in.points == [("x", 1.0, 1)]
    assert "cannot be written: service is down" in console.messages[0]


@pytest.mark.parametrize("name", list(PACKAGES))
def test_services_get_project_name_and_settings(name: str, tmp_path: Path, installed) -> None:
    stand_in = installed(name)
    open_one(name, tmp_path)
    calls = dict(stand_in.calls)
    if name == "mlflow":
        assert calls["set_experiment"] == "project"
        assert calls["create_run"]["name"] == "name"
        assert calls["params"] == {"data.seed": "1", "data.files": "[a,b]", "judge.api_key": "***"}
    else:
        assert calls["init"]["project"] == "project"
        assert calls["init"]["name"] == "name"
        assert calls["init"]["config"] == {"data": {"seed": 1, "files": ["a", "b"]}, "judge": {"api_key": "***"}}


@pytest.mark.parametrize("name", list(PACKAGES))
def test_a_resumed_run_continues_and_a_new_one_does_not(name: str, tmp_path: Path, installed) -> None:
    identities = []
    for resumed_step in (None, 3, None):
        stand_in = installed(name)
        sink = open_one(name, tmp_path, resumed_step)
        sink.log({"x": 1.0}, 4)
        sink.close()
        given = dict(stand_in.calls)
        if name == "mlflow":
            assert ("update_run" in given) == (resumed_step is not None)
            assert ("params" in given) == (resumed_step is None), "MLflow refuses to change parameters"
            identities.append(given["log"])
        elif name == "swanlab":
            identities.append(given["init"]["id"])
        else:
            assert (
                given["init"]["resume"]
                == {None: {"wandb": None, "trackio": "never"}}.get(resumed_step, {"wandb": "auto", "trackio": "allow"})[
                    name
                ]
            )
    if name == "swanlab":
        assert identities[0] == identities[1] != identities[2]
    if name == "mlflow":
        assert identities[0] == identities[1]


def test_many_settings_reach_mlflow_in_parts(tmp_path: Path, installed) -> None:
    stand_in = installed("mlflow")
    settings = {"a": {f"x{index}": index for index in range(249)}, "b": "y z " * 2000}
    open_sinks(["mlflow"], RunInfo(tmp_path, settings=settings), RecordingConsole())
    assert [len(given) for call, given in stand_in.calls if call == "params"] == [100, 100, 50]


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [("wandb", "CommError", "no route"), ("mlflow", "MlflowException", "API request to http://x failed")],
)
def test_a_service_that_cannot_be_reached_at_the_start_is_opened_later(
    name: str, error: str, text: str, tmp_path: Path, installed
) -> None:
    stand_in, console = installed(name), RecordingConsole()
    stand_in.error = type(error, (Exception,), {})(text)
    sink = open_one(name, tmp_path, console=console)
    stand_in.error = None
    sink.log({"x": 1.0}, 1)
    sink.close()
    assert stand_in.points == [("x", 1.0, 1)]
    assert text in console.messages[0]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (
            "wandb",
            {"val/generations": (["prompt", "score"], [["2+2=", 1.0], ["1+1=", 0.0]]), "val/generations_step": 7},
        ),
        ("mlflow", {"val/generations/step_7.json": {"prompt": ["2+2=", "1+1="], "score": [1.0, 0.0]}}),
    ],
)
def test_services_show_tables_and_other_loggers_ignore_them(
    name: str, shown: dict[str, Any], tmp_path: Path, installed
) -> None:
    stand_in = installed(name)
    sinks = open_sinks([name, "jsonl", "console"], RunInfo(tmp_path), RecordingConsole())
    rows = [{"prompt": "2+2=", "score": 1.0}, {"prompt": "1+1=", "score": 0.0}]
    sinks.log_table(Table("val/generations", rows), 7)
    assert [given for call, given in stand_in.calls if call == "log_table"] == [shown]
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_mlflow_shows_episodes_as_traces_at_the_times_that_were_recorded(tmp_path: Path, installed) -> None:
    stand_in = installed("mlflow")
    row = dict.fromkeys(EPISODE_COLUMNS, "x") | {"score": 1.0, "started": 1.0, "generated": 3.0, "scored": 4.5}
    open_sinks(["mlflow"], RunInfo(tmp_path), RecordingConsole()).log_table(Table(EPISODES, [row]), 7)
    calls = [each for each in stand_in.calls if "trace" in each[0] or "span" in each[0]]
    tags = {"step": "7"} | dict.fromkeys(("group", "index", "branch", "data_source", "finish_reason"), "x")
    assert calls[0] == ("start_trace", ("episode", {"prompt": "x"}, tags, "7", "id-2", 1_000_000_000))
    assert calls[1:] == [
        ("start_span", ("generate", "trace", "root", {"prompt": "x"}, 1_000_000_000)),
        ("end_span", ("generate", {"response": "x"}, 3_000_000_000)),
        ("start_span", ("score", "trace", "root", {"response": "x", "ground_truth": "x"}, 3_000_000_000)),
        ("end_span", ("score", {"score": 1.0}, 4_500_000_000)),
        ("end_trace", ("trace", {"response": "x", "score": 1.0}, 4_500_000_000)),
    ]


def test_a_table_is_kept_until_the_service_works(tmp_path: Path, installed) -> None:
    stand_in, now = installed("wandb"), [0.0]
    console = RecordingConsole()
    info = RunInfo(tmp_path)
    sink = BufferedSink(lambda: open_wandb(info), "wandb", "", console, clock=lambda: now[0])
    stand_in.error = ConnectionError("no route")
    sink.log_table(Table("val/generations", [{"score": 1.0}]), 7)
    stand_in.error, now[0] = None, 100.0
    sink.log({"reward/mean": 0.5}, 8)
    tables = [given for call, given in stand_in.calls if call == "log_table"]
    assert tables == [{"val/generations": (["score"], [[1.0]]), "val/generations_step": 7}] * 2
    assert stand_in.points == [("reward/mean", 0.5, 8)]
