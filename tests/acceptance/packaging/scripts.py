"""108 public launch scripts: which run here, and what becomes of each of their 529 keys.

make show-scripts [ARGS="[--short] [--write]"]

39 of the scripts need neither Megatron, SGLang, another accelerator, another training engine nor images: their settings
resolve, with no unknown key and no error but values of features that are not built yet, which are listed. The other 69
are refused by the name of such a feature; in one of them the settings name another one than its list of needs, since
the images are in its data and model alone. Every key has a row in docs/migration_keys.md, which `--write`
generates.

A value that the script took from a shell variable is not in the data (null; an empty text where its quotes were lost).
It gets, in this order: the value in SAMPLES; 2 for sizes of parallelism, since with 1 nothing would be parallel; the
default of the script's origin; the default here. A script for an accelerator that its settings do not name finds it
on its machine, so `trainer.device` is added.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from _common import ROOT, finish

from verl.config.legacy.aliases import resolve_alias
from verl.config.legacy.answers import Answer, find_answer
from verl.config.legacy.defaults import SFT_DEFAULTS, TRAIN_DEFAULTS
from verl.config.legacy.launch_script import ENTRIES, REFUSED_ENTRIES
from verl.config.load import GENERATE, SFT, TRAIN, AnyRunType, load, load_for_generation, load_sft
from verl.config.paths import find_setting, format_value, join_path
from verl.errors import ConfigError

DATA = Path(__file__).parent / "data" / "launch_scripts.jsonl.gz"
PAGE = ROOT / "docs" / "migration_keys.md"
SCRIPTS, RUNNABLE, KEYS = 108, 39, 529
FEATURES = {
    "megatron": "Megatron-Core",
    "sglang": "SGLang",
    "npu": "Ascend NPUs",
    "multimodal": "images and videos",
    "veomni": "VeOmni",
}
"""What a script of the 69 needs -> the feature that its refusal names."""
SAMPLES = {
    "data.train_files": "train.parquet",
    "data.val_files": "test.parquet",
    "model.path": "Qwen/Qwen3-8B",
    "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
    "actor_rollout_ref.model.lora_adapter_path": "adapter",
    "distillation.teacher.path": "Qwen/Qwen3-32B",
    "reward.reward_model.model_path": "my-org/reward-model",
    "reward.custom_reward_function.path": "reward.py",
    "actor_rollout_ref.rollout.n": "8",
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "1.0",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "8192",
    "actor_rollout_ref.rollout.max_model_len": "8192",
    "trainer.default_local_dir": "checkpoints/run",
}
PLANNED = {
    ".tensor_model_parallel_size": "tensor parallelism",
    ": megatron ": "Megatron-Core",
    ".megatron.": "Megatron-Core",
    ": sglang ": "SGLang",
    "trainer.logger": "other metric loggers",
}
"""Text of a refusal of a declared setting -> the feature; the first match counts."""


class Script(NamedTuple):
    name: str
    run_type: AnyRunType
    needs: list[str]
    settings: list[tuple[str, str | None]]
    refused_entry: str | None

    @property
    def is_runnable(self) -> bool:
        return not set(self.needs) & set(FEATURES)


class Outcome(NamedTuple):
    unknown: list[str]
    features: list[str]
    other: list[str]


def read_scripts() -> list[Script]:
    rows = [json.loads(line) for line in gzip.decompress(DATA.read_bytes()).splitlines()]
    return [
        Script(
            row["script"],
            ENTRIES.get(row["entry"], SFT if row["script"].startswith("sft/") else TRAIN),
            row["needs"],
            row["settings"],
            REFUSED_ENTRIES.get(row["entry"]),
        )
        for row in rows
    ]


def overrides(script: Script) -> Iterator[str]:
    """The settings of a script as overrides, with values in place of shell variables."""
    for key, value in script.settings:
        yield f"{key}={fill(key.lstrip('+~'), script.run_type) if value in (None, '') else value}"
    if "npu" in script.needs and not any(key == "trainer.device" for key, _ in script.settings):
        yield "trainer.device=npu"


def fill(key: str, run_type: AnyRunType) -> str:
    path = resolve_alias(tuple(key.split(".")), run_type.aliases)
    target, setting = join_path(path), find_setting(path, run_type.root)
    if key in SAMPLES or target in SAMPLES:
        return SAMPLES.get(key) or SAMPLES[target]
    if key.endswith("parallel_size"):
        return "2"
    others = SFT_DEFAULTS if run_type is SFT else TRAIN_DEFAULTS
    if target in others:
        return others[target].value
    if setting is None or setting.open or setting.section is not None:
        return "null"
    return format_value(setting.default)


def resolve(script: Script) -> Outcome:
    """Load the settings as a run would, and sort the problems."""
    arguments = [
        text for text in overrides(script) if script.run_type is not GENERATE or "data.output_path" not in text
    ]
    problems: list[str] = []
    try:
        if script.run_type is GENERATE:
            load_for_generation(arguments)
        else:
            (load_sft if script.run_type is SFT else load)(arguments, complete=False)
    except ConfigError as error:
        problems = error.problems
    unknown = [problem for problem in problems if "is not a setting" in problem or "is a setting of" in problem]
    refused = {problem: feature for problem in problems if (feature := find_feature(problem))}
    features = sorted({*refused.values(), *([script.refused_entry] if script.refused_entry else [])})
    return Outcome(unknown, features, [problem for problem in problems if problem not in (*unknown, *refused)])


def find_feature(problem: str) -> str | None:
    """Return the name of the missing feature that a problem is about; None if it is about something else."""
    if match := re.search(r" requires (.+?), which is not supported yet", problem):
        return match[1]
    if "is not supported yet" not in problem:
        return None
    return next((feature for text, feature in PLANNED.items() if text in problem), None)


# --- the page


def answers(scripts: list[Script]) -> dict[str, dict[str, Answer]]:
    """Key -> command -> what becomes of the key there, for every key of every script."""
    result: dict[str, dict[str, Answer]] = {}
    for script in scripts:
        for name, _ in script.settings:
            key = name.lstrip("+~")
            run_type = TRAIN if script.run_type is GENERATE else script.run_type
            result.setdefault(key, {})[run_type.command] = find_answer(key, run_type)
    return dict(sorted(result.items()))


def describe(answer: Answer) -> str:
    target, text = f"`{answer.target}`", answer.text.replace("|", "\\|")
    return {
        "setting": f"setting{f'; {text}' if text else ''}",
        "renamed": f"renamed to {target}",
        "forwarded": f"passed on to vLLM: {target}",
        "always on": f"always on: {text}",
        "ignored": f"ignored: {text}",
        "needs": f"refused: needs {text}",
        "unknown": "UNKNOWN",
    }[answer.kind]


HEAD = """\
# Keys of launch scripts

What becomes of each of the {count} keys that {scripts} public launch scripts set. This page is generated by
`make show-scripts ARGS=--write` from the [settings](settings.md), their aliases and the rules in
`verl/config/legacy`; how to move over is on [another page](migration.md).

A key that is refused is refused by the name of the feature that it needs, except with the values in brackets.

| key | command | answer |
| --- | --- | --- |
"""


def render_page(scripts: list[Script]) -> str:
    table = answers(scripts)
    rows = [
        f"| `{key}` | {' and '.join(sorted(group, reverse=True))} | {text} |"
        for key, by_command in table.items()
        for text, group in group_by_text(by_command).items()
    ]
    return HEAD.format(count=len(table), scripts=len(scripts)) + "\n".join(rows) + "\n"


def group_by_text(by_command: dict[str, Answer]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for command, answer in by_command.items():
        groups.setdefault(describe(answer), []).append(command)
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--write", action="store_true", help="write docs/migration_keys.md")
    scripts = read_scripts()
    page = render_page(scripts)
    if parser.parse_args().write:
        PAGE.write_text(page, encoding="utf-8")
    resolved = refused = by_own_need = 0
    unsupported, complaints = Counter[str](), list[str]()
    print(f"{'script':<66} {'needs':<24} outcome")
    for script in scripts:
        outcome = resolve(script)
        needed = {FEATURES[need] for need in script.needs if need in FEATURES}
        if script.is_runnable:
            is_fine = not outcome.unknown and not outcome.other
            resolved += is_fine
            unsupported.update(outcome.features)
            verdict = "runs" if not outcome.features else f"runs but for {', '.join(outcome.features)}"
        else:
            is_fine = not outcome.unknown and bool(set(FEATURES.values()) & set(outcome.features))
            refused += is_fine
            by_own_need += is_fine and bool(needed & set(outcome.features))
            verdict = f"refused: {', '.join(outcome.features)}"
        print(f"{script.name:<66} {' '.join(script.needs):<24} {verdict}")
        if not is_fine:
            complaints += [f"  {script.name}: {text}" for text in (*outcome.unknown, *outcome.other)]
    print(*complaints, sep="\n")
    report(scripts, (resolved, refused, by_own_need), unsupported, page)


def report(scripts: list[Script], counts: tuple[int, int, int], unsupported: Counter[str], page: str) -> None:
    resolved, refused, by_own_need = counts
    table = answers(scripts)
    kinds: Counter[str] = Counter(next(iter(by_command.values())).kind for by_command in table.values())
    unanswered = [key for key, by in table.items() if any(answer.kind == "unknown" for answer in by.values())]
    is_current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page
    count = sum(script.is_runnable for script in scripts)
    finish(
        "scripts",
        (len(scripts), count, len(table)) == (SCRIPTS, RUNNABLE, KEYS)
        and (resolved, refused) == (count, len(scripts) - count)
        and not unanswered
        and is_current,
        scripts=len(scripts),
        resolved=f"{resolved} of {count}",
        refused_by_feature=f"{refused} of {len(scripts) - count}",
        by_a_listed_need=by_own_need,
        keys=len(table),
        answers=dict(kinds),
        unanswered=unanswered,
        values_of_missing_features=dict(unsupported.most_common()),
        page_is_current=is_current,
    )


if __name__ == "__main__":
    main()
