"""Metrics for Prometheus: their names and values over HTTP, those of engines, and failures that a run must not feel."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from grafana_dashboard import build_dashboard, list_metrics, list_panels
from prometheus_client import REGISTRY, Gauge, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from recording_console import RecordingConsole

from verl.cluster.actors import free_port
from verl.cluster.local import LocalActor
from verl.config.load import load
from verl.rollout.engine_metrics import collect_engine_metrics, read_engine_metrics
from verl.tracking.explanations import EXPLANATIONS
from verl.tracking.prometheus import exporter
from verl.tracking.prometheus.exporter import EngineMetrics, PrometheusSink, RunMetrics, open_exporter
from verl.tracking.prometheus.names import COUNTERS, Sample, to_sample
from verl.tracking.sink import RunInfo
from verl.trainer.build.runtime import open_tracker
from verl.trainer.train_loop import LoopSchedule
from verl.workers.rollout import RemoteEngine

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "examples/monitoring/grafana_dashboard.json"
RUN = RunInfo(Path("unused"), "arithmetic", "grpo-1", total_steps=20)
LABELS = {"project": "arithmetic", "experiment": "grpo-1"}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def key(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, tuple(sorted({**LABELS, **labels}.items()))


def parse(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


async def scrape(sink: PrometheusSink) -> Samples:
    async with httpx.AsyncClient() as client:
        return parse((await client.get(f"http://127.0.0.1:{sink.port}/metrics", timeout=30)).text)


@pytest.mark.parametrize(
    ("metric", "sample"),
    [
        ("reward/mean", Sample("verl_reward_mean")),
        ("timing_s/gen", Sample("verl_timing_seconds", (("phase", "gen"),))),
        ("perf/tokens_per_s/update", Sample("verl_perf_tokens_per_second", (("phase", "update"),))),
        ("val/openai/gsm8k/mean@4", Sample("verl_val", (("data_source", "openai/gsm8k"), ("metric", "mean@4")))),
        ("val/loss", Sample("verl_val_loss")),
        ("perf/controller_rss_gib", Sample("verl_perf_controller_rss_bytes", factor=2.0**30)),
        ("reward/extra/Ünïcode name!", Sample("verl_reward_extra_n_code_name")),
    ],
)
def test_names_follow_the_conventions_of_prometheus(metric: str, sample: Sample) -> None:
    assert to_sample(metric) == sample
    assert re.fullmatch(r"[a-z_][a-z0-9_]*", sample.name)


async def test_a_scrape_has_the_last_values_and_the_sums_of_all_steps() -> None:
    console = RecordingConsole()
    sink = PrometheusSink("127.0.0.1", 0, RUN, console)
    try:
        console.history.record_warning("the reward does not rise")
        sink.log({"reward/mean": 0.25, "plan/tokens": 100.0, "timing_s/step": 2.0, "perf/controller_rss_gib": 2.0}, 1)
        sink.log({"reward/mean": 0.5, "plan/tokens": 50.0, "timing_s/step": 3.0, "actor/kl": float("nan")}, 2)
        sink.log({"val/addition/mean@1": 0.75}, 2)
        found = await scrape(sink)
    finally:
        sink.close()
    assert found[key("verl_reward_mean")] == 0.5
    assert found[key("verl_perf_controller_rss_bytes")] == 2.0 * 2**30, "a value that is not logged again stays"
    assert found[key("verl_val", data_source="addition", metric="mean@1")] == 0.75
    assert found[key("verl_timing_seconds", phase="step")] == 3.0
    assert found[key("verl_actor_kl")] != found[key("verl_actor_kl")], "NaN"
    assert found[key("verl_tokens_total")] == 150.0
    assert found[key("verl_steps_total")] == found[key("verl_step")] == 2.0
    assert found[key("verl_planned_steps")] == 20.0
    assert found[key("verl_warnings_total")] == 1.0


def test_the_time_of_the_last_step_is_not_that_of_a_validation() -> None:
    times = iter([10.0, 20.0])
    metrics = RunMetrics(RUN, RecordingConsole(), clock=lambda: next(times))
    for given, at in (
        ({"timing_s/step": 1.0}, 10.0),
        ({"timing_s/validation": 1.0}, 10.0),
        ({"timing_s/step": 1.0}, 20),
    ):
        metrics.update(given, 1)
        [sample] = [s for m in metrics.collect() for s in m.samples if s.name == "verl_last_step_timestamp_seconds"]
        assert sample.value == at


class Engine:
    """A rollout actor with one counter."""

    def __init__(self, tokens: float, reply: Callable[[], Any] | None = None) -> None:
        self.tokens, self.reply, self.calls = tokens, reply, 0

    async def read_metrics(self) -> list[Metric]:
        self.calls += 1
        if self.reply is not None:
            await self.reply()
        counter = CounterMetricFamily("vllm:generation_tokens", "Generated tokens.")
        counter.add_sample("vllm:generation_tokens_total", {"engine": "0", "model_name": "m"}, self.tokens)
        counter.add_sample("vllm:generation_tokens_created", {"engine": "0", "model_name": "m"}, 1.7e9)
        return [counter]


async def let_run() -> None:
    """Let everything run that does not wait for anything."""
    for _ in range(100):
        await asyncio.sleep(0)


async def fail() -> None:
    raise ConnectionError("its process has died")


async def test_metrics_of_engines_are_told_apart_and_a_failed_engine_is_left_out() -> None:
    engines = {3: Engine(7.0), 4: Engine(0.0, fail), 5: Engine(9.0)}
    remote = {each: RemoteEngine(LocalActor(engine), each) for each, engine in engines.items()}
    sink = PrometheusSink("127.0.0.1", 0, RUN, RecordingConsole(), lambda: read_engine_metrics(remote))
    try:
        found = await scrape(sink)
    finally:
        sink.close()
    tokens = {dict(labels)["replica"]: value for (name, labels), value in found.items() if "generation" in name}
    assert tokens == {"3": 7.0, "5": 9.0}
    assert key("vllm:generation_tokens_total", engine="0", model_name="m", replica="3") in found
    assert found[key("verl_rollout_engines")] == 2.0


async def test_an_engine_that_does_not_reply_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.rollout.engine_metrics.REPLY_S", 0.01)
    hanging = Engine(0.0, asyncio.Event().wait)
    found = await read_engine_metrics({0: hanging, 1: Engine(1.0)})
    assert list(found) == [1]
    assert hanging.calls == 1


async def test_a_scrape_does_not_wait_for_a_run_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "MIN_INTERVAL_S", -1.0)
    engine = Engine(1.0)
    metrics = EngineMetrics(lambda: read_engine_metrics({0: engine}), asyncio.get_running_loop())

    def tokens() -> list[float]:
        names = "vllm:generation_tokens_total"
        return [sample.value for metric in metrics.collect() for sample in metric.samples if sample.name == names]

    assert await asyncio.to_thread(tokens) == [1.0]
    engine.tokens = 2.0
    monkeypatch.setattr(exporter, "ENGINES_TIMEOUT_S", 0.01)
    with ThreadPoolExecutor() as threads:
        assert threads.submit(tokens).result() == [1.0], "this blocks the event loop, as training in one process does"
    await let_run()
    engine.reply = asyncio.Event().wait
    assert await asyncio.to_thread(tokens) == [2.0], "the answer that came too late"
    await let_run()
    assert engine.calls == 3


async def test_scrapes_at_the_same_time_ask_the_engines_once() -> None:
    engine = Engine(1.0)
    metrics = EngineMetrics(lambda: read_engine_metrics({0: engine}), asyncio.get_running_loop())
    await asyncio.gather(*(asyncio.to_thread(lambda: list(metrics.collect())) for _ in range(4)))
    assert engine.calls == 1


def test_a_scrape_after_the_end_of_the_run_gets_no_engines() -> None:
    loop = asyncio.new_event_loop()
    metrics = EngineMetrics(lambda: read_engine_metrics({0: Engine(1.0)}), loop)
    loop.close()
    assert [metric.name for metric in metrics.collect()] == ["verl_rollout_engines"]


def test_an_actor_reports_what_its_engine_has_registered() -> None:
    gauge = Gauge("vllm:kv_cache_usage_perc", "KV cache in use.")
    own = Gauge("something_else", "Of another library.")
    try:
        assert [metric.name for metric in collect_engine_metrics()] == ["vllm:kv_cache_usage_perc"]
    finally:
        for each in (gauge, own):
            REGISTRY.unregister(each)


async def test_a_port_that_is_taken_is_reported_and_the_run_goes_on() -> None:
    console = RecordingConsole()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        sink = open_exporter("127.0.0.1", taken.getsockname()[1], RUN, console)
        sink.log({"reward/mean": 0.5}, 1)
    [advice] = console.messages
    assert "Training continues" in advice
    assert "Set trainer.prometheus.port to a free port" in advice


async def test_a_run_serves_its_metrics_on_loopback_only_if_told_to(tmp_path: Path) -> None:
    required = ("actor_rollout_ref.model.path=m", "data.train_files=d", f"trainer.default_local_dir={tmp_path}")
    port = free_port()
    given = [f"trainer.prometheus.port={port}", "trainer.project_name=arithmetic"]
    for enable, is_served in (("false", False), ("true", True)):
        [loaded] = load([*required, *given, f"trainer.prometheus.enable={enable}"])
        schedule = LoopSchedule(batch=1, total_steps=3)
        tracker = open_tracker(loaded.config, RecordingConsole(), schedule, 0)
        tracker.log({"reward/mean": 0.5}, 1)
        try:
            async with httpx.AsyncClient() as client:
                found = parse((await client.get(f"http://127.0.0.1:{port}/metrics", timeout=30)).text)
            assert is_served
            assert found["verl_reward_mean", (("experiment", "default"), ("project", "arithmetic"))] == 0.5
        except httpx.ConnectError:
            assert not is_served
        finally:
            tracker.close()


def test_the_dashboard_is_up_to_date() -> None:
    assert json.loads(DASHBOARD.read_text()) == build_dashboard(), "run `make docs`"


def test_panels_do_not_overlap_and_are_about_the_chosen_run() -> None:
    cells = set()
    for panel in build_dashboard()["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & own, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own
    for panel in list_panels():
        for expression in panel.expressions():
            selectors = re.findall(r"\{([^}]*)\}", expression)
            assert selectors, expression
            assert all('project="$project",experiment="$experiment"' in each for each in selectors), expression


def test_every_metric_of_the_dashboard_exists() -> None:
    own = {to_sample(metric).name for each in EXPLANATIONS for metric in each.metrics}
    served = RunMetrics(RUN, RecordingConsole())
    served.update({"timing_s/step": 1.0}, 1)
    own |= {sample.name for metric in served.collect() for sample in metric.samples} | {"verl_rollout_engines"}
    wanted = list_metrics()
    assert {name for name in wanted if name.startswith("verl_")} - own == set()
    assert {f"{name}_total" for name, _ in COUNTERS.values()} <= own
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.submodule_search_locations
    source = Path(vllm.submodule_search_locations[0], "v1/metrics/loggers.py").read_text()
    theirs = {
        name for plain in re.findall(r'"(vllm:\w+)"', source) for name in (plain, f"{plain}_total", f"{plain}_bucket")
    }
    assert {name for name in wanted if name.startswith("vllm:")} - theirs == set()
