"""The Grafana dashboard of a run, examples/monitoring/grafana_dashboard.json, from a list of its panels.

python tests/grafana_dashboard.py > examples/monitoring/grafana_dashboard.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RUN = 'project="$project",experiment="$experiment"'
"""What selects the metrics of a run; in the queries below, `RUN` stands for it."""

RATE = "$__rate_interval"
WIDTH, COLUMNS, HEIGHT = 8, 24, 8


@dataclass(frozen=True)
class Panel:
    """A chart with one curve, or more, for each query; `queries` are PromQL by their legend."""

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    is_stacked: bool = False

    def expressions(self, run: str = RUN, rate: str = RATE) -> list[str]:
        """Return the queries for a run, over a window for rates."""
        return [query.replace("RUN", run).replace("RATE", rate) for query in self.queries.values()]


def phase(names: str) -> str:
    return f'verl_timing_seconds{{RUN,phase=~"{names}"}}'


def per_replica(metric: str) -> str:
    return f"sum by (replica) (rate({metric}{{RUN}}[RATE]))"


def latency(quantile: float) -> str:
    return f"histogram_quantile({quantile}, sum by (le) (rate(vllm:e2e_request_latency_seconds_bucket{{RUN}}[RATE])))"


PANELS: Mapping[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel(
            "Reward", {"mean": "verl_reward_mean{RUN}", "min": "verl_reward_min{RUN}", "max": "verl_reward_max{RUN}"}
        ),
        Panel("Validation", {"{{data_source}} {{metric}}": 'verl_val{RUN,metric=~"mean@.*|maj@.*|pass@.*"}'}),
        Panel("Prompts without signal", {"share": "verl_reward_groups_without_signal{RUN}"}, "percentunit"),
        Panel(
            "KL divergence", {"from the reference": "verl_actor_kl_loss{RUN}", "of an update": "verl_actor_ppo_kl{RUN}"}
        ),
        Panel("Entropy", {"entropy": "verl_actor_entropy{RUN}"}),
        Panel("Gradient norm", {"norm": "verl_actor_grad_norm{RUN}"}),
        Panel("Response length", {"mean": "verl_response_length_mean{RUN}"}),
        Panel("Truncated responses", {"share": "verl_response_length_clip_ratio{RUN}"}, "percentunit"),
        Panel("Trainer and engine disagree by", {"probability": "verl_training_rollout_probs_diff_mean{RUN}"}),
    ),
    "Speed": (
        Panel("Time of a step", {"{{phase}}": phase("gen|prepare|update|sync")}, "s", is_stacked=True),
        Panel("Tokens per second", {"trained": "rate(verl_tokens_total{RUN}[RATE])"}),
        Panel("Steps per hour", {"steps": "3600 * rate(verl_steps_total{RUN}[RATE])"}),
        Panel(
            "Memory",
            {
                "controller": "verl_perf_controller_rss_bytes{RUN}",
                "train worker": "verl_perf_train_worker_rss_bytes{RUN}",
            },
            "bytes",
        ),
        Panel("Staleness", {"versions": "verl_training_staleness{RUN}"}),
        Panel("Progress", {"done": "verl_step{RUN} / verl_planned_steps{RUN}"}, "percentunit"),
    ),
    "Health": (
        Panel("Since the last step", {"seconds": "time() - verl_last_step_timestamp_seconds{RUN}"}, "s"),
        Panel("Warnings", {"warnings": "verl_warnings_total{RUN}"}),
        Panel("Rollout engines", {"replied": "verl_rollout_engines{RUN}"}),
    ),
    "Rollout engines (vLLM)": (
        Panel(
            "Requests",
            {
                "running {{replica}}": "sum by (replica) (vllm:num_requests_running{RUN})",
                "waiting {{replica}}": "sum by (replica) (vllm:num_requests_waiting{RUN})",
            },
        ),
        Panel("KV cache in use", {"engine {{replica}}": "vllm:kv_cache_usage_perc{RUN}"}, "percentunit"),
        Panel("Preemptions per second", {"engine {{replica}}": per_replica("vllm:num_preemptions_total")}),
        Panel("Generated tokens per second", {"engine {{replica}}": per_replica("vllm:generation_tokens_total")}),
        Panel("Prompt tokens per second", {"engine {{replica}}": per_replica("vllm:prompt_tokens_total")}),
        Panel("Time of a request", {"median": latency(0.5), "95%": latency(0.95)}, "s"),
    ),
}
"""Panels by row."""


def list_panels() -> list[Panel]:
    return [panel for row in PANELS.values() for panel in row]


def list_metrics() -> set[str]:
    """Return the names of all metrics in the queries."""
    names = re.compile(r"\b((?:verl_|vllm:)\w+)\{")
    return {name for panel in list_panels() for query in panel.queries.values() for name in names.findall(query)}


def build_dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it; the data source, project and experiment are chosen in it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, members in PANELS.items():
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": row, "gridPos": place, "panels": []})
        y += 1
        for index, panel in enumerate(members):
            x, line = index * WIDTH % COLUMNS, index * WIDTH // COLUMNS
            place = {"h": HEIGHT, "w": WIDTH, "x": x, "y": y + line * HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_chart(panel)})
        y += -(-len(members) * WIDTH // COLUMNS) * HEIGHT
    return {
        "uid": "verl-run",
        "title": "verl: a run",
        "tags": ["verl"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                _variable("project", "label_values(verl_step, project)"),
                _variable("experiment", 'label_values(verl_step{project="$project"}, experiment)'),
            ]
        },
        "panels": panels,
    }


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _chart(panel: Panel) -> dict[str, Any]:
    custom = {"fillOpacity": 25, "stacking": {"mode": "normal"}} if panel.is_stacked else {"fillOpacity": 0}
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(zip(panel.queries, panel.expressions(), strict=True))
        ],
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {"name": name, "type": "query", "datasource": _SOURCE, "query": query, "definition": query, "refresh": 2}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(build_dashboard(), indent=2) + "\n")
