"""`verl plan`: estimate the memory and the time of a run, and propose the fastest settings with which it fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from verl.commands.arguments import SETTINGS_HELP, ArgumentParser
from verl.config.load import load
from verl.config.schema import MISSING, Config
from verl.config.train_engines import get_train_engine
from verl.errors import ConfigError, VerlError
from verl.memory_plan.accelerators import DEVICES, GIB, Device
from verl.memory_plan.device_memory import USABLE, MemoryPlan
from verl.memory_plan.model_memory import Usage
from verl.memory_plan.run_plan import get_cluster, get_workload, plan_memory
from verl.memory_plan.step_time import Cluster, Workload, estimate_seconds, suggest_split
from verl.memory_plan.suggestions import Suggestion, describe_current, format_changes, rank_suggestions

MUCH_FASTER = 1.3
"""How much faster another width of engines must be estimated to be, to be mentioned if a run fits."""

HELP = f"""\
usage: verl plan [--nodes N] [--gpus N] [--device NAME] [--memory GIB] [--json] [settings]

Estimate the memory of each phase and the time of a step of `verl train` with the same settings, and propose the fastest
settings with which it fits. It needs the config.json of the model, no weights and no accelerator. All figures are
estimates.

options:
  --nodes N               machines; default: trainer.nnodes
  --gpus N                accelerators per machine; default: trainer.n_gpus_per_node
  --device NAME           {", ".join(DEVICES)}; default: H100
  --memory GIB            memory of an accelerator; default: that of the device
  --json                  as one JSON object, in bytes and seconds

{SETTINGS_HELP}
example:
  verl plan --nodes 4 --gpus 8 actor_rollout_ref.model.path=Qwen2.5-32B/config.json data.max_response_length=8192
"""


def main(argv: Sequence[str]) -> int:
    """Print the plan of a run; return 0 if it fits, with the given or the proposed settings, else 1."""
    config, device, as_json = read_arguments(argv)
    return _plan(config, device, as_json=as_json)


def read_arguments(argv: Sequence[str]) -> tuple[Config, Device, bool]:
    parser = ArgumentParser("verl plan")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--device", default="H100", choices=DEVICES)
    parser.add_argument("--memory", type=float)
    parser.add_argument("--json", action="store_true")
    options, rest = parser.parse_known_args(list(argv))
    counts = {"trainer.nnodes": options.nodes, "trainer.n_gpus_per_node": options.gpus}
    runs = load([*rest, *(f"{key}={value}" for key, value in counts.items() if value is not None)], complete=False)
    if len(runs) != 1:
        raise VerlError("verl plan: takes one value per setting; remove -m")
    if runs[0].config.actor_rollout_ref.model.path == MISSING:
        raise ConfigError(
            [
                "actor_rollout_ref.model.path: must be given: a Hugging Face model folder, or its config.json, as "
                "in verl plan --gpus 8 actor_rollout_ref.model.path=Qwen2.5-7B/config.json"
            ]
        )
    device = DEVICES[options.device]
    if options.memory is not None:
        device = replace(device, memory_gib=options.memory)
    return runs[0].config, device, options.json


def _plan(config: Config, device: Device, *, as_json: bool) -> int:
    from verl.trainer.build.worker_settings import train_settings  # imports Ray, after the settings

    run, load, cluster = plan_memory(config, train_settings), get_workload(config), get_cluster(config, device)
    problems, ranked = run.problems(device.memory), rank_suggestions(config, device, train_settings)
    best = ranked[0] if problems and ranked else None
    if as_json:
        report = {
            "parameters": run.models["actor"].shape.parameters,
            "memory": {phase: dict(usage.items()) for phase, usage in run.phases(device.memory).items()},
            "seconds": estimate_seconds(run, cluster, load),
            "problems": problems,
            "changes": {} if best is None else best.values,
            "ranking": [
                {"changes": each.values, "seconds": each.seconds, "memory": each.plan.peak(device.memory)}
                for each in ranked
            ],
        }
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        lines = [*_describe(run, cluster), "", *_memory_table(run, device), "", *_verdict(config, problems, ranked)]
        if best is not None:
            run = best.plan
            lines += ["", *_memory_table(run, device)]
        if len(ranked) > 1:
            lines += ["", *_ranking(ranked, device)]
        lines += ["", *_time_table(run, cluster, load)]
        sys.stdout.write("\n".join(lines) + "\n")
    return int(bool(problems) and best is None)


def _verdict(config: Config, problems: Mapping[str, str], ranked: Sequence[Suggestion]) -> list[str]:
    if not problems:
        return ["Every phase fits.", *_faster_width(config, ranked)]
    lines = ["It does not fit:", *(f"  {phase}: {problem}" for phase, problem in problems.items()), ""]
    if not ranked:
        lines.append("No settings make it fit: use more accelerators (--nodes) or shorter sequences.")
        if "adapters" in get_train_engine(config.actor_rollout_ref.actor.strategy).capabilities:
            lines.append("An adapter also needs less memory (actor_rollout_ref.actor.peft.lora_rank).")
        return lines
    return [*lines, "It fits with:", *_list_changes(config, ranked[0])]


def _faster_width(config: Config, ranked: Sequence[Suggestion]) -> list[str]:
    """Return the width of engines with which a run that fits would be much faster."""
    best, as_set = ranked[0], next(each for each in ranked if not each.changes)
    if as_set.seconds < MUCH_FASTER * best.seconds:
        return []
    title = f"A step is estimated to be {as_set.seconds / best.seconds:.1f} times faster with:"
    return ["", title, *_list_changes(config, best)]


def _list_changes(config: Config, suggestion: Suggestion) -> list[str]:
    return [
        f"  {' '.join(format_changes([change]))}  (now {describe_current(config, change)}; {change.cost})"
        for change in suggestion.changes
    ]


def _ranking(ranked: Sequence[Suggestion], device: Device) -> list[str]:
    """Return the table of the best settings for each width of engines."""
    lines = ["The best settings for each width of engines, by estimate:", "  s/step   GiB  settings"]
    for each in ranked:
        settings = " ".join(format_changes(each.changes)).replace("actor_rollout_ref.", "") or "as set"
        lines.append(f"{each.seconds:>8,.4g}{each.plan.peak(device.memory) / GIB:>6.1f}  {settings}")
    return lines


def _describe(run: MemoryPlan, cluster: Cluster) -> list[str]:
    actor, engine = run.models["actor"], run.engine
    size = actor.update or actor.forward
    lines = [
        f"{actor.settings.model_path}: {actor.shape.parameters / 1e9:.2f} billion parameters, on {cluster.ranks} "
        f"{cluster.device.name} with {cluster.device.memory_gib:g} GiB",
        f"models on every rank: {', '.join(run.models)}; {size.tokens:,} tokens per micro-batch",
    ]
    if engine is not None:
        state = "asleep during training" if engine.sleeps else "awake during training"
        cache = max(0, engine.cache(cluster.device.memory))
        full = cache // (engine.tokens * engine.token_bytes)
        lines.append(
            f"engine: {engine.share:.0%} of {engine.width} device{'s' * (engine.width > 1)}, {state}; its cache holds "
            f"{full:,} sequences of {engine.tokens:,} tokens"
        )
    return lines


_COLUMNS = {
    "weights": "weights",
    "gradients": "gradients",
    "moments": "moments",
    "activations": "activat.",
    "logits": "logits",
    "buffers": "buffers",
    "engine weights": "engine",
    "kv cache": "KV cache",
    "reserved": "reserved",
}


def _memory_table(run: MemoryPlan, device: Device) -> list[str]:
    header = f"{'GiB per rank':<14}" + "".join(f"{title:>10}" for title in _COLUMNS.values()) + f"{'total':>10}  fits"
    return [header, *(_row(phase, usage, device) for phase, usage in run.phases(device.memory).items())]


def _row(phase: str, usage: Usage, device: Device) -> str:
    parts = dict(usage.items())
    cells = "".join(f"{parts[name] / GIB:>10.1f}" if parts[name] else f"{'-':>10}" for name in _COLUMNS)
    fits = "yes" if usage.total <= USABLE * device.memory else "no"
    return f"{phase:<14}{cells}{usage.total / GIB:>10.1f}  {fits}"


def _time_table(run: MemoryPlan, cluster: Cluster, load: Workload) -> list[str]:
    seconds = estimate_seconds(run, cluster, load)
    lines = [
        f"Time of a step of {load.sequences:,} sequences at their maximum length, estimated from operations and bytes:",
        "  " + "; ".join(f"{phase} {value:,.3g} s" for phase, value in seconds.items()),
    ]
    split = suggest_split(seconds, cluster.ranks, run.engine.width if run.engine is not None else 1)
    if split is not None:
        lines.append(
            f"  On separate devices, {split[0]} for rollout and {split[1]} for training would take equally long."
        )
    return lines
