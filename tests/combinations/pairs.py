"""A covering array: combinations in which every pair of levels occurs that the checks of settings do not refuse.

python -m tests.combinations.pairs [--write]

A pair is refused if it is refused in each of `CONTEXTS`, with the plain level of all other factors. `--write` writes
the table of refused pairs to docs/combinations.md.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.combinations.factors import FACTORS, Combination, list_overrides, plain
from verl.config.checks import TRAIN_CONFLICTS
from verl.config.checks.requirements import find_unsupported
from verl.config.paths import Tree, set_path
from verl.config.schema import Config, Section

PAGE = Path(__file__).parents[2] / "docs/combinations.md"
MODELS = Path(__file__).with_name("models")  # as much of their files as checks of settings read
Level = tuple[str, str]
"""A factor and one of its levels."""
Levels = frozenset[Level]
_DEFAULTS = Config()
CHECKS = [check for check in TRAIN_CONFLICTS if check is not find_unsupported]  # no level has an unsupported value

CONTEXTS: tuple[Combination, ...] = tuple(
    {**estimator, "ranks": ranks, "engine": engine}
    for ranks in FACTORS["ranks"]
    for engine in FACTORS["engine"]
    for estimator in (
        {"estimator": "grpo"},
        {"estimator": "gae", "critic": "full"},
        {"estimator": "rloo"},
    )
)
"""What a pair may need besides the plain levels: a critic, the estimator that PRIME needs, ranks, an engine."""
MASKS: Levels = frozenset([("loss", "dpo"), ("loss", "sppo"), ("distillation", "teacher alone")])
"""Levels that train without advantages, so that settings of estimators and critics have no effect."""
ORDER = ("engine", "ranks", "agent", "reward", "estimator", "critic", "loss")
"""Factors whose levels are chosen first, because others depend on them."""
TRIES = 30


def find_conflicts(combination: Combination) -> list[tuple[str, str]]:
    """Return the settings that are refused in a combination, each with the reason."""
    tree: Tree = {}
    for key, value in list_overrides(combination, MODELS).items():
        set_path(tree, tuple(key.split(".")), value)
    config = _change(_DEFAULTS, tree)
    return [(each.key, each.reason) for check in CHECKS for each in check(config) if not isinstance(each, str)]


def _change(section: Any, tree: Tree) -> Any:
    """Return a section with some values changed. Only what is changed is validated: there are thousands of calls."""
    sections = {
        name: value for name in type(section).model_fields if isinstance(value := getattr(section, name), Section)
    }
    changed = {name: _change(sections[name], value) if name in sections else value for name, value in tree.items()}
    return type(section).model_validate(sections | changed)


class PairTable:
    """Which pairs of levels can be combined, found out when they are asked for."""

    def __init__(self) -> None:
        self.possible: set[Levels] = set()
        self._levels: dict[Level, tuple[str, str] | None] = {}
        self.refused: dict[Levels, tuple[str, str]] = {}
        """The first conflict of each refused pair."""
        self.larger: dict[Levels, tuple[str, str]] = {}
        """The same, of more than two levels that cannot be combined although each pair of them can be."""

    def is_refused(self, pair: Levels) -> bool:
        if pair not in self.possible and pair not in self.refused:
            alone = [conflict for level in pair if (conflict := self._find_conflict_of_level(level))]
            conflict = alone[0] if alone else self._find_conflict(pair)
            if conflict is not None:
                self.refused[pair] = conflict
        return pair in self.refused

    def _find_conflict_of_level(self, level: Level) -> tuple[str, str] | None:
        """Return why a level is refused with everything, or None."""
        if level not in self._levels:
            self._levels[level] = self._find_conflict(frozenset([level]))
        return self._levels[level]

    def _find_conflict(self, levels: Levels) -> tuple[str, str] | None:
        """Return why levels are refused in all contexts; None if there is one in which they are not."""
        for context in CONTEXTS:
            combination = plain() | context | dict(levels)
            conflicts = find_conflicts(combination)
            if not conflicts:
                self.record(combination)
                return None
        return min(conflicts)

    def record(self, combination: Combination) -> None:
        """Record which pairs of a combination are possible, unless a level is off because of a third one."""
        masks = MASKS & combination.items()
        self.possible |= {pair for pair in list_pairs(combination) if masks <= pair}

    def rejects(self, combination: Combination) -> bool:
        """Whether a combination has a pair that is known to be refused, or more levels that are."""
        levels = set(combination.items())
        return any(pair in self.refused for pair in list_pairs(combination)) or any(
            group <= levels for group in self.larger
        )

    def explain(self, combination: Combination) -> None:
        """Find out what is refused in a combination: pairs, or else the levels without which it is not."""
        refused = [pair for pair in list_pairs(combination) if self.is_refused(pair)]
        if refused:
            return
        conflict = min(find_conflicts(combination))
        needed = dict(combination)
        for factor in combination:
            for level in FACTORS[factor]:
                if conflict[0] not in [key for key, _ in find_conflicts(combination | {factor: level})]:
                    break
            else:
                del needed[factor]
        self.larger[frozenset(needed.items())] = conflict


def list_pairs(combination: Combination) -> Iterator[Levels]:
    return map(frozenset, combinations(combination.items(), 2))


def list_all_pairs() -> list[Levels]:
    levels = [[(factor, level) for level in FACTORS[factor]] for factor in FACTORS]
    return [frozenset((one, other)) for first, second in combinations(levels, 2) for one in first for other in second]


def cover(table: PairTable) -> list[Combination]:
    """Return combinations with every pair that is not refused.

    Combinations with vLLM, which take longest, come first and are as few as possible.
    """
    draw, rows = random.Random(0), list[Combination]()
    left = dict.fromkeys(list_all_pairs())
    while wanted := next((pair for pair in left if ("engine", "vllm") in pair), None) or next(iter(left), None):
        if table.is_refused(wanted):
            del left[wanted]
            continue
        row = _complete(wanted, left, table, draw)
        table.record(row)
        rows.append(row)
        for pair in list_pairs(row):
            left.pop(pair, None)
    return rows


def _complete(wanted: Levels, left: Iterable[Levels], table: PairTable, draw: random.Random) -> Combination:
    """Return a combination with a pair and as many others that are left as a greedy choice finds."""
    for attempt in range(TRIES):
        row = dict(wanted)
        if "engine" not in row:
            row["engine"] = "hf" if attempt < TRIES // 2 else draw.choice(list(FACTORS["engine"]))
        others = [factor for factor in FACTORS if factor not in row]
        draw.shuffle(others)
        others.sort(key=lambda factor: ORDER.index(factor) if factor in ORDER and attempt % 2 else len(ORDER))
        for factor in others:
            levels = list(FACTORS[factor])
            draw.shuffle(levels)
            fitting = [level for level in levels if not table.rejects(row | {factor: level})]
            if not fitting:
                break
            chosen = set(row.items())
            row[factor] = max(
                fitting,
                key=lambda level, factor=factor, chosen=chosen: sum(  # type: ignore[misc]
                    frozenset((each, (factor, level))) in left for each in chosen
                ),
            )
        else:
            row = {factor: row[factor] for factor in FACTORS}
            if not find_conflicts(row):
                return row
            table.explain(row)
    raise AssertionError(f"no combination found with {sorted(wanted)}, which is not refused")


def format_page(table: PairTable) -> str:
    """Return the page with the factors, and the refused pairs by the setting that the message names."""
    levels = sum(map(len, FACTORS.values()))
    lines = [
        *("# Which features can be combined", ""),
        f"A run has {len(FACTORS)} factors with {levels} levels. `make show-combinations` trains combinations in which "
        "every pair of levels occurs, except the pairs below: these are refused before anything starts, with a message "
        "that names the setting. The runs are on CPUs, synchronous, with FSDP2 and with vLLM or transformers. "
        "`python -m tests.combinations.pairs --write` writes this page.",
        *("", "| factor | levels |", "| --- | --- |"),
        *(f"| {factor} | {_list(FACTORS[factor])} |" for factor in FACTORS),
        *("", "## Refused combinations", "", "| this | with | setting | reason |", "| --- | --- | --- | --- |"),
        *_format_rows(table),
    ]
    return "\n".join([*lines, ""])


def _format_rows(table: PairTable) -> Iterator[str]:
    left = dict(table.refused)
    for level in [(factor, level) for factor in FACTORS for level in FACTORS[factor]]:
        own = [pair for pair in left if level in pair]
        if len(own) == sum(len(FACTORS[factor]) for factor in FACTORS if factor != level[0]):
            yield _format_row(level, "everything", left[own[0]])
            for pair in own:
                del left[pair]
    grouped: dict[tuple[Level, str, str], tuple[list[str], tuple[str, str]]] = {}
    for pair, conflict in left.items():
        one, other = sorted(pair, key=lambda level: _count(level, left), reverse=True)
        grouped.setdefault((one, other[0], conflict[0]), ([], conflict))[0].append(other[1])
    for (one, factor, _), (names, conflict) in sorted(grouped.items()):
        yield _format_row(one, f"{factor}: {_list(sorted(names))}", conflict)
    for levels, conflict in sorted(table.larger.items(), key=lambda item: sorted(item[0])):
        one, *others = sorted(levels)
        yield _format_row(one, "; ".join(f"{factor}: `{level}`" for factor, level in others), conflict)


def _list(levels: Iterable[str]) -> str:
    return ", ".join(f"`{level}`" for level in levels)


def _count(level: Level, pairs: Iterable[Levels]) -> tuple[int, Level]:
    return sum(level in pair for pair in pairs), level


def _format_row(level: Level, others: str, conflict: tuple[str, str]) -> str:
    key, reason = conflict
    return f"| {level[0]}: `{level[1]}` | {others} | `{key}` | {reason.replace('|', ' ')} |"


def main() -> None:
    table = PairTable()
    rows = cover(table)
    page = format_page(table)
    if "--write" in sys.argv:
        PAGE.write_text(page)
    engines = [row["engine"] for row in rows]
    print(page, f"{len(rows)} combinations, {engines.count('vllm')} of them with vLLM", file=sys.stderr)


if __name__ == "__main__":
    main()
