"""The server that Prometheus scrapes: the last metrics of the run, and those of its rollout engines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from verl.tracking.buffered_sink import BufferedSink
from verl.tracking.console import Console
from verl.tracking.explanations import EXPLANATIONS
from verl.tracking.prometheus.names import COUNTERS, to_sample
from verl.tracking.sink import RunInfo

ReadEngines = Callable[[], Coroutine[Any, Any, Mapping[int, Sequence[Metric]]]]
"""Returns the metrics of the rollout engines that reply, by the id of the engine."""

ENGINES_TIMEOUT_S = 0.5
MIN_INTERVAL_S = 1.0


def open_exporter(
    host: str, port: int, run: RunInfo, console: Console, read_engines: ReadEngines | None = None
) -> BufferedSink:
    """Open a metric logger that serves what it gets. A port that is taken is reported, and tried again later."""
    fix = "Set trainer.prometheus.port to a free port; a Prometheus server itself listens on 9090."
    name = f"metrics for Prometheus at {host}:{port}"
    return BufferedSink(lambda: PrometheusSink(host, port, run, console, read_engines), name, fix, console)


_HELP = {
    "verl_step": "Steps done.",
    "verl_planned_steps": "Steps of the whole run.",
    "verl_last_step_timestamp_seconds": "When the last step ended, in seconds since 1970.",
    "verl_timing_seconds": "Seconds of each phase of the last step, and of saves, validations and the start.",
    "verl_val": "Metrics of the last validation by data source.",
}


class PrometheusSink:
    """Serves the last value of every metric over HTTP, from threads of its own.

    A scrape reads what the run has stored. Only the metrics of engines are asked for in the event loop of the run,
    at most once per `MIN_INTERVAL_S`; a scrape waits for them up to `ENGINES_TIMEOUT_S`, and then gets the ones before.
    """

    def __init__(
        self, host: str, port: int, run: RunInfo, console: Console, read_engines: ReadEngines | None = None
    ) -> None:
        self._metrics = RunMetrics(run, console)
        registry = CollectorRegistry()
        registry.register(self._metrics)
        if read_engines is not None:
            labels = {"project": run.project, "experiment": run.name}
            registry.register(EngineMetrics(read_engines, asyncio.get_running_loop(), labels))
        self._server, self._thread = start_http_server(port, host, registry)
        console.note(f"metrics for Prometheus: http://{host}:{self.port}/metrics")

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._metrics.update(metrics, step)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class RunMetrics:
    """The last value of every metric of the run, with counters for what a step adds."""

    def __init__(self, run: RunInfo, console: Console, clock: Callable[[], float] = time.time) -> None:
        self._labels = {"project": run.project, "experiment": run.name}
        self._history, self._clock = console.history, clock
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._help = dict(_HELP)
        self._counts = {name: (0.0, text) for name, text in COUNTERS.values()}
        self._counts["verl_steps"] = (0.0, "Steps that this process has done.")
        if run.total_steps is not None:
            self._values["verl_planned_steps", ()] = float(run.total_steps)

    def update(self, metrics: Mapping[str, float], step: int) -> None:
        """Store what the run has logged after a step, or between steps. Readers see all of it, or nothing."""
        values, counts = dict(self._values), dict(self._counts)
        for metric, value in metrics.items():
            name, labels, factor = to_sample(metric)
            values[name, labels] = float(value) * factor
            if name not in self._help:
                self._help[name] = _describe(metric)
        added = {name: metrics[metric] for metric, (name, _) in COUNTERS.items() if metric in metrics}
        if "timing_s/step" in metrics:
            values["verl_last_step_timestamp_seconds", ()] = self._clock()
            added["verl_steps"] = 1.0
        for name, count in added.items():
            before, text = counts[name]
            counts[name] = before + count, text
        values["verl_step", ()] = float(step)
        self._values, self._counts = values, counts

    def collect(self) -> Iterator[Metric]:
        by_name = defaultdict(list)
        for (name, labels), value in list(self._values.items()):
            by_name[name].append((labels, value))
        for name, samples in by_name.items():
            gauge = GaugeMetricFamily(name, self._help.get(name, ""))
            for labels, value in samples:
                gauge.add_sample(name, self._labels | dict(labels), value)
            yield gauge
        warnings = {"verl_warnings": (float(self._history.warning_count), "Warnings on the console.")}
        for name, (value, text) in (self._counts | warnings).items():
            counter = CounterMetricFamily(name, text)
            counter.add_sample(f"{name}_total", self._labels, value)
            yield counter


class EngineMetrics:
    """The metrics of all rollout engines under one name each, with the id of the engine as the label `replica`.

    Args:
        read_engines: Asks the engines.
        loop: The event loop of the run, in which this has to happen.
        labels: Labels of the run, which every metric gets too.
    """

    def __init__(
        self, read_engines: ReadEngines, loop: asyncio.AbstractEventLoop, labels: Mapping[str, str] | None = None
    ) -> None:
        self._read, self._loop, self._labels = read_engines, loop, dict(labels or {})
        self._lock = threading.Lock()
        self._last: Mapping[int, Sequence[Metric]] = {}
        self._asked_at = -MIN_INTERVAL_S
        self._answer: Future[Mapping[int, Sequence[Metric]]] | None = None

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        engines = self._refresh()
        for engine, metrics in engines.items():
            for metric in metrics:
                into = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                extra = {**self._labels, "replica": str(engine)}
                into.samples += [
                    sample._replace(labels=sample.labels | extra)
                    for sample in metric.samples
                    if not sample.name.endswith("_created")  # when it was registered, one for each counter
                ]
        yield from merged.values()
        count = GaugeMetricFamily("verl_rollout_engines", "Rollout engines that have replied.")
        count.add_sample("verl_rollout_engines", self._labels, float(len(engines)))
        yield count

    def _refresh(self) -> Mapping[int, Sequence[Metric]]:
        """Ask the engines, unless this was done just now. An answer that comes too late is for the next scrape."""
        with self._lock:  # scrapes at the same time share one answer
            self._take_answer(0.0)
            if self._answer is None and time.monotonic() - self._asked_at >= MIN_INTERVAL_S:
                self._asked_at = time.monotonic()
                self._answer = self._ask()
            self._take_answer(ENGINES_TIMEOUT_S)
            return self._last

    def _ask(self) -> Future[Mapping[int, Sequence[Metric]]] | None:
        asking = self._read()
        try:
            return asyncio.run_coroutine_threadsafe(asking, self._loop)
        except RuntimeError:  # the run has ended
            asking.close()
            self._last = {}
            return None

    def _take_answer(self, timeout_s: float) -> None:
        if self._answer is None:
            return
        try:
            self._last = self._answer.result(timeout_s)
        except TimeoutError:  # the run is busy with something else
            return
        except CancelledError:  # it ends
            self._last = {}
        self._answer = None


def _describe(metric: str) -> str:
    return next((each.meaning for each in EXPLANATIONS if each.is_about(metric)), f"{metric} of the last step.")
