"""Which features can be combined: the table in the docs, and the covering array of `make show-combinations`."""

from __future__ import annotations

import pytest

from tests.combinations.factors import FACTORS, plain
from tests.combinations.pairs import PAGE, PairTable, cover, find_conflicts, format_page, list_all_pairs, list_pairs


def test_page_lists_what_is_refused_and_the_array_covers_the_rest() -> None:
    table = PairTable()
    rows = cover(table)
    assert PAGE.read_text() == format_page(table), "run python -m tests.combinations.pairs --write"
    covered = {pair for row in rows for pair in list_pairs(row)}
    assert covered | table.refused.keys() == set(list_all_pairs())
    assert all(row.keys() == FACTORS.keys() for row in rows)


@pytest.mark.parametrize(
    ("levels", "key"),
    [
        ({"critic": "full"}, "critic.enable"),
        ({"layout": "Ulysses"}, "actor_rollout_ref.actor.ulysses_sequence_parallel_size"),
        ({"transport": "nccl"}, "actor_rollout_ref.rollout.weight_transport"),
    ],
)
def test_refused_levels_name_a_setting(levels: dict[str, str], key: str) -> None:
    assert find_conflicts(plain()) == []
    assert key in [name for name, _ in find_conflicts(plain() | levels)]
