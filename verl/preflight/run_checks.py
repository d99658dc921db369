"""Runs the checks in their order: cheap ones always, those that read rows and score responses if the rest is right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from verl.config.features import data_splits, scores_responses, uses_reward_function
from verl.config.schema import MISSING, Config
from verl.errors import RewardError, VerlError
from verl.memory_plan.accelerators import Device
from verl.preflight.finding import Finding, Report, Severity
from verl.preflight.machine import (
    count_gpus,
    describe_machine,
    find_address,
    find_device_findings,
    find_machine_findings,
    find_port_findings,
)
from verl.preflight.settings import TOPIC as SETTINGS
from verl.preflight.settings import check_settings

MACHINE, MODEL, DATA, FOLDER, DEVICES = "machine", "model", "data", "folder", "devices"
CLUSTER, PROMPTS, REWARD, MEMORY = "cluster", "prompts", "reward", "memory"


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the checks: time for reading rows, for one score, and the rows that are scored."""

    read_s: float = 2.0
    score_s: float = 2.5
    reward_rows: int = 4


def check_machine() -> Report:
    """Check this machine and the installation."""
    report = Report()
    gpus = count_gpus()
    report.add(MACHINE, find_machine_findings(gpus))
    report.checked[MACHINE] = describe_machine(gpus)
    return report


def check_run(argv: Sequence[str], device: Device | None = None, limits: Limits | None = None) -> Report:
    """Check everything about a run that can be known before it starts, as `verl train` with the same arguments.

    Args:
        argv: Settings and options.
        device: The accelerators for which memory and time are estimated; None for those of this machine.
        limits: Bounds of the checks that read rows and score responses.
    """
    report = check_machine()
    runs = check_settings(argv, report)
    wrong = {finding.place for finding in report.findings if finding.severity == Severity.ERROR}
    for run in runs:
        _check_files(run.config, report, wrong)
    for run in runs[:1]:
        if find_address(run.config) is not None and DEVICES not in report.failed:
            with _reported(report, CLUSTER):
                from verl.preflight.cluster import check_cluster  # imports Ray

                found, report.checked[CLUSTER] = check_cluster(run.config)
                report.add(CLUSTER, found)
    if runs:
        _check_contents(runs[0].config, report, device, limits or Limits())
    return report


def _check_files(config: Config, report: Report, wrong: set[str]) -> None:
    """Check what needs no row and no tokenizer. Settings that are `wrong` have defaults, which nobody asked for."""
    from verl.preflight import files

    gpus = count_gpus()
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        MODEL: lambda: files.find_model_findings(config),
        DATA: lambda: files.find_data_findings(config),
        FOLDER: lambda: files.find_folder_findings(config),
        DEVICES: lambda: [*find_device_findings(config, gpus), *find_port_findings(config)],
    }
    for topic, check in checks.items():
        with _reported(report, topic):
            found = list(check())
            report.add(topic, (each for each in found if each.place.partition("=")[0] not in wrong))
    report.checked[MODEL] = config.actor_rollout_ref.model.path
    report.checked[FOLDER] = str(config.trainer.checkpoint_dir)
    if DATA not in report.failed and config.data.train_files != MISSING:
        report.checked[DATA] = files.describe_data(config)


def _check_contents(config: Config, report: Report, device: Device | None, limits: Limits) -> None:
    """Check rows, rewards, and memory, each if what it needs is right."""
    needs = {PROMPTS: (SETTINGS, MODEL, DATA), REWARD: (SETTINGS, DATA), MEMORY: (SETTINGS, MODEL)}
    blocked = {topic: [need for need in needs[topic] if need in report.failed] for topic in needs}
    for topic, need in blocked.items():
        if need:
            verb = "is" if need == [MODEL] else "are"
            report.skipped[topic] = f"until the {' and the '.join(need)} {verb} right"
    scores = uses_reward_function(config) and scores_responses(config)
    with ThreadPoolExecutor(1) as background:
        trial = None
        if not scores:
            report.skipped[REWARD] = "no reward function is used"
        elif not blocked[REWARD]:
            trial = background.submit(_try_reward, config, limits)
        elif _has_own_reward(config):
            trial = background.submit(_load_reward, config)
        if not blocked[PROMPTS]:
            with _reported(report, PROMPTS):
                from verl.preflight.prompts import check_prompts

                prompts = check_prompts(config, limits.read_s)
                report.add(PROMPTS, prompts.findings)
                report.checked[PROMPTS] = str(prompts)
        if not blocked[MEMORY]:
            with _reported(report, MEMORY):
                _check_memory(config, report, device)
        if trial is not None:
            with _reported(report, REWARD):
                findings, summary = trial.result()
                report.add(REWARD, findings)
                report.checked[REWARD] = summary


def _check_memory(config: Config, report: Report, device: Device | None) -> None:
    from verl.preflight.memory import check_memory

    memory = check_memory(config, device)
    if memory is None:
        report.skipped[MEMORY] = "no GPU on this machine; name one: --device H100"
    else:
        report.add(MEMORY, memory.findings)
        report.checked[MEMORY] = memory.summary


def _has_own_reward(config: Config) -> bool:
    return config.reward.custom_reward_function.path is not None or bool(config.reward.functions)


def _load_reward(config: Config) -> tuple[list[Finding], str]:
    from verl.trainer.build.preflight import check_reward

    asyncio.run(check_reward(config))
    return [], "loads; no row was scored"


def _try_reward(config: Config, limits: Limits) -> tuple[list[Finding], str]:
    """Score the reference solutions and an empty response of some rows."""
    from verl.preflight import reward_trial as trial
    from verl.preflight.reward_rows import read_reward_rows

    files = next(iter(data_splits(config).values()))
    rows = read_reward_rows(files, config.data.prompt_key, limits.reward_rows)
    calls = [trial.Call(row, trial.REFERENCE, text) for row in rows for text in row.references]
    calls += [trial.Call(row, trial.EMPTY, "") for row in rows]
    timeout_s = min(limits.score_s, config.reward.deadline_s)
    outcomes = asyncio.run(trial.try_reward(config, calls, timeout_s=timeout_s, workers=1))
    findings = [*trial.find_failures(outcomes, timeout_is_fatal=False), *trial.find_no_signal(outcomes)]
    return findings, f"reference solutions and an empty response on {len(rows)} rows"


@contextmanager
def _reported(report: Report, topic: str) -> Iterator[None]:
    """Turn what a check raises into findings."""
    try:
        yield
    except VerlError as error:
        messages = getattr(error, "problems", None) or [str(error)]
        found = [Finding.from_message(message) for message in messages]
        fix = "fix the function" if isinstance(error, RewardError) else ""
        report.add(topic, [replace(each, place=each.place or topic, fix=each.fix or fix) for each in found])
    except Exception as error:  # noqa: BLE001 - tokenizers, templates, tools and agents run here
        report.add(topic, [Finding(Severity.ERROR, topic, f"{type(error).__name__}: {error}")])
