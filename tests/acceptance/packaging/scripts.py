"""Launch scripts of other setups: which run here, and what becomes of each of their keys.

make show-scripts [ARGS="[--short] [--write]"]

1. The real arguments of 39 public scripts with text, FSDP, and vLLM or SGLang, captured by running them, resolve with
   their own values, or each problem names the value of the script that is not built yet; so do 19 asynchronous ones,
   with the batch, the steps and the defaults of the module that they start. (../shared/data/launch_scripts)
2. `verl migrate` finds the same arguments as bash in the scripts of data/launch_scripts, which use the constructs of
   public ones. bash runs each of them in the sandbox with a recording python on PATH.
3. Each of the 826 keys of the public main configuration, and of the 27 of the asynchronous ones, is a setting, an
   alias, or has an answer, and its public default is accepted or refused by the name of a feature.
   (../shared/data/launch_scripts)
4. The settings of 108 public scripts: the 40 that need neither Megatron, another accelerator, another training engine
   nor images resolve, with no unknown key and no error but values of features that are not built yet. The other 68 are
   refused by the name of such a feature, or resolve too if they need no more of Megatron-Core than is built; the
   settings of one of them name another feature than its list of needs. Every key has a row in
   docs/migration_keys.md, which `--write` generates.

A value that a script of part 4 took from a shell variable is not in the data (null; an empty text where its quotes were
lost). It gets, in this order: the value in SAMPLES; 2 for sizes of parallelism, since with 1 nothing would be parallel;
the default of the script's origin; the default here. A script for an accelerator that its settings do not name finds it
on its machine, so `trainer.device` is added. Parts 1 and 3 are skipped, with a message, where their data are missing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from _bash_reference import read_header, record
from _common import ROOT, finish
from key_answers import Answer, find_answer

from verl.config.command_line import parse_overrides
from verl.config.load import GENERATE, SFT, TRAIN, AnyRunType, load, load_for_generation, load_sft
from verl.config.paths import find_setting, format_value, get_path, join_path
from verl.errors import ConfigError, VerlError
from verl.migration.capture import capture, restore_variables
from verl.migration.launches import ENTRIES, MODULE_DEFAULTS, REFUSED_ENTRIES, find_launches

DATA = Path(__file__).parent / "data" / "launch_scripts.jsonl.gz"
CONSTRUCTS = Path(__file__).parent / "data" / "launch_scripts"
SHARED = ROOT.parent / "shared" / "data" / "launch_scripts"
PAGE = ROOT / "docs" / "migration_keys.md"
SCRIPTS, RUNNABLE, KEYS = 108, 40, 529
CAPTURED, ASYNCHRONOUS, PUBLIC_KEYS, MIN_CONSTRUCTS = 39, 19, 826 + 27, 30
SYNCHRONOUS: tuple[list[str], ...] = ([], ["sglang"])
OTHER_FEATURES = re.compile("geo3k|megatron|npu|trtllm")
"""What an asynchronous script needs besides, by its name."""
BATCH_FACTORS = (
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "async_training.require_batches",
    "async_training.trigger_parameter_sync_step",
)
FEATURES = {
    "megatron": "Megatron-Core",
    "npu": "Ascend NPUs",
    "multimodal": "images and videos",
    "veomni": "VeOmni",
}
"""What a script of the 68 needs -> the feature that its refusal names."""
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
    def has_megatron(self) -> bool:
        """Whether it trains with Megatron-Core, or can."""
        return "megatron" in self.needs or "engine.tensor_model_parallel_size" in dict(self.settings)

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
    path = run_type.legacy.resolve_alias(tuple(key.split(".")))
    target, setting = join_path(path), find_setting(path, run_type.root)
    if key in SAMPLES or target in SAMPLES:
        return SAMPLES.get(key) or SAMPLES[target]
    if key.endswith("parallel_size"):
        return "2"
    others = run_type.legacy.defaults
    if target in others:
        return others[target].value
    if setting is None or setting.open or setting.section is not None:
        return "null"
    return format_value(setting.default)


def resolve(script: Script) -> Outcome:
    """Load the settings as a run would, and sort the problems."""
    problems = find_problems(list(overrides(script)), script.run_type)
    unknown = [problem for problem in problems if "is not a setting" in problem or "is a setting of" in problem]
    refused = {problem: feature for problem in problems if (feature := find_feature(problem))}
    features = sorted({*refused.values(), *([script.refused_entry] if script.refused_entry else [])})
    return Outcome(unknown, features, [problem for problem in problems if problem not in (*unknown, *refused)])


def find_problems(arguments: list[str], run_type: AnyRunType) -> list[str]:
    """Return what is wrong with the arguments of a run."""
    try:
        if run_type is GENERATE:
            load_for_generation([text for text in arguments if "data.output_path" not in text])
        else:
            (load_sft if run_type is SFT else load)(arguments, complete=False)
    except ConfigError as error:
        return error.problems
    return []


def find_feature(problem: str) -> str | None:
    """Return the name of the missing feature that a problem is about; None if it is about something else."""
    if match := re.search(r" requires (.+?), which is not supported yet", problem):
        return match[1]
    if "is not supported yet" not in problem:
        return None
    return next((feature for text, feature in PLANNED.items() if text in problem), None)


# --- captured arguments, constructs of the shell, and keys of the public configuration


def check_captured() -> tuple[dict[str, object], bool]:
    """Resolve the real arguments of public scripts."""
    rows = read_shared("captured.jsonl")
    if rows is None:
        return {"captured": "skipped"}, True
    figures: dict[str, object] = {}
    is_fine = True
    for name, needs, expected in (("captured", SYNCHRONOUS, CAPTURED), ("asynchronous", (["async"],), ASYNCHRONOUS)):
        rest = [row for row in rows if row["needs"] in needs]
        chosen = [row for row in rest if needs is SYNCHRONOUS or not OTHER_FEATURES.search(row["script"])]
        outcomes = Counter(check_arguments(row) for row in chosen)
        figures |= {name: len(chosen), f"{name}_resolved": outcomes["resolves"], f"{name}_named": outcomes["names"]}
        is_fine &= len(chosen) == expected and not outcomes["FAILS"]
    return figures, is_fine


def check_arguments(row: dict[str, Any]) -> str:
    """Resolve the arguments of one script; print and return the outcome."""
    run_type, defaults = ENTRIES[row["module"]], MODULE_DEFAULTS.get(row["module"])
    arguments = [*(["--config-name", defaults] if defaults else []), *row["arguments"]]
    given = {text.lstrip("+~").partition("=")[0] for text in row["arguments"]}
    problems = find_problems(arguments, run_type)
    keys = {join_path(run_type.legacy.resolve_alias(tuple(key.split(".")))) for key in given}
    unnamed = [p for p in problems if "not supported yet" not in p or p.partition(":")[0] not in keys | given]
    refused = [p.partition(":")[0] for p in problems]
    kept = [text for text in arguments if run_type.legacy.resolve_alias(key_path(text)) not in map(key_path, refused)]
    unnamed = unnamed or find_other_values(kept, run_type)
    outcome = "FAILS" if unnamed else "names" if problems else "resolves"
    print(f"{row['script']:<66} {outcome}")
    print(*(f"    {text}" for text in problems or unnamed), sep="\n", end="\n" if problems or unnamed else "")
    return outcome


def key_path(text: str) -> tuple[str, ...]:
    return tuple(text.lstrip("+~").partition("=")[0].split("."))


def find_other_values(arguments: list[str], run_type: AnyRunType) -> list[str]:
    """Return the settings that do not have the value that the script gives them."""
    given: dict[str, Any] = {}
    for override in parse_overrides([text for text in arguments if "=" in text and not text.startswith("--")], []):
        path, value = run_type.legacy.canonicalize(tuple(override.key_or_group.split(".")), override.value(), [])
        setting = find_setting(path, run_type.root)
        if setting is not None and setting.section is None and not run_type.legacy.unsets(path, value):
            given[join_path(path)] = value
    given |= find_batch(given)
    if run_type is GENERATE:
        config: Any = load_for_generation([text for text in arguments if "data.output_path" not in text]).config
    else:
        config = (load_sft if run_type is SFT else load)(arguments, complete=False)[0].config
    found = {key: get_path(config, tuple(key.split("."))) for key in given}
    return [f"{key} is {found[key]}, not {value}" for key, value in given.items() if not is_same(found[key], value)]


def find_batch(given: dict[str, Any]) -> dict[str, Any]:
    """Return the batch and the steps of a fully asynchronous script, which writes 0 prompts per batch."""
    sizes = [given.get(key) for key in BATCH_FACTORS]
    if given.get("data.train_batch_size") != 0 or not all(isinstance(size, int) for size in sizes):
        return {}
    batch, prompts = math.prod(sizes), given["actor_rollout_ref.rollout.total_rollout_steps"]
    return {"data.train_batch_size": batch, "trainer.total_training_steps": prompts // batch}


def is_same(found: object, given: object) -> bool:
    if isinstance(given, str) and not isinstance(found, str):
        return str(found).lower() == given.lower() or given.split(",") == found or "${" in given
    return found == given or (isinstance(found, tuple) and list(found) == given)


def check_constructs() -> tuple[dict[str, object], bool]:
    """Compare the arguments that `verl migrate` finds with those that bash gives to python."""
    files = {file: read_header(file.read_text()) for file in sorted(CONSTRUCTS.glob("*.sh"))}
    files = {file: header for file, header in files.items() if not header.is_part}
    equal = launches = 0
    for file, header in files.items():
        expected = record(file, header)
        try:
            found = find_launches(file, capture(file, header.given, header.arguments)).launches
        except VerlError as error:
            print(error)
            found = []
        arguments = [list(map(restore_variables, launch.arguments)) for launch in found]
        is_equal = bool(expected) and arguments == expected
        equal += is_equal
        launches += len(expected)
        print(f"{file.name:<66} {len(expected)} launches {'equal' if is_equal else f'{arguments} != {expected}'}")
    figures = {"migrated_as_bash": f"{equal} of {len(files)}", "launches": launches}
    return figures, equal == len(files) >= MIN_CONSTRUCTS


def check_keys() -> tuple[dict[str, object], bool]:
    """Answer every key of the public configurations, also with its default."""
    rows = read_shared("public_keys.jsonl")
    if rows is None:
        return {"public_keys": "skipped"}, True
    rows = [row for row in rows if row["config"] in ("main", "fully_async", "one_step_off")]
    answered = Counter(find_answer(row["key"], TRAIN).kind for row in rows)
    unanswered = [row["key"] for row in rows if find_answer(row["key"], TRAIN).kind == "unknown"]
    complaints = []
    for row in rows:
        if "${" in str(row["default"]) or row["default"] == "???":
            continue
        setting = f"++{row['key']}={json.dumps(row['default'], ensure_ascii=False)}"
        problems = find_problems(["algorithm.adv_estimator=gae", setting], TRAIN)  # their default: PPO
        complaints += [problem for problem in problems if "not supported yet" not in problem]
    print(*(f"  unanswered: {key}" for key in unanswered), *(f"  default: {text}" for text in complaints), sep="\n")
    figures = {"public_keys": len(rows), "unanswered_keys": len(unanswered), "wrong_defaults": len(complaints)}
    return {**figures, "key_answers": dict(answered)}, len(rows) == PUBLIC_KEYS and not unanswered and not complaints


def read_shared(name: str) -> list[dict[str, Any]] | None:
    file = SHARED / name
    if not file.exists():
        print(f"{file} is missing: this part is skipped")
        return None
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


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
    parser.add_argument("--short", action="store_true", help="the same: it takes a minute")
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
            is_built = needed == {FEATURES["megatron"]} and not (outcome.features or outcome.other)
            named = outcome.features if script.has_megatron else set(FEATURES.values()) & set(outcome.features)
            is_fine = not outcome.unknown and (is_built or bool(named))
            refused += is_fine
            by_own_need += is_fine and bool(needed & set(outcome.features))
            verdict = "runs with Megatron-Core" if is_built else f"refused: {', '.join(outcome.features)}"
        print(f"{script.name:<66} {' '.join(script.needs):<24} {verdict}")
        if not is_fine:
            complaints += [f"  {script.name}: {text}" for text in (*outcome.unknown, *outcome.other)]
    print(*complaints, sep="\n")
    parts = [check() for check in (check_captured, check_keys, check_constructs)]
    report(scripts, (resolved, refused, by_own_need), unsupported, page, parts)


def report(
    scripts: list[Script],
    counts: tuple[int, int, int],
    unsupported: Counter[str],
    page: str,
    parts: list[tuple[dict[str, object], bool]],
) -> None:
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
        and is_current
        and all(passed for _, passed in parts),
        scripts=len(scripts),
        resolved=f"{resolved} of {count}",
        refused_by_feature=f"{refused} of {len(scripts) - count}",
        by_a_listed_need=by_own_need,
        keys=len(table),
        answers=dict(kinds),
        unanswered=unanswered,
        values_of_missing_features=dict(unsupported.most_common()),
        page_is_current=is_current,
        **{name: value for figures, _ in parts for name, value in figures.items()},
    )


if __name__ == "__main__":
    main()
