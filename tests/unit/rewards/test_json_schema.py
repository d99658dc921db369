"""JSON by a schema: what counts as the answer, what is valid, and schemas that are none."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.rewards.scorers.json_schema import compute_score, extract_json

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
GOOD = '{"name": "Ada", "age": 36}'
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)])
@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"\n{GOOD}\n",
        f"```json\n{GOOD}\n```",
        f"Here it is:\n```\n{GOOD}\n```\nI hope it helps.",
        f'<think>{{"name": 1}}</think>{GOOD}',
        f'```json\n{{"name": 1}}\n```\nNo:\n```json\n{GOOD}\n```',
    ],
)
def test_valid_json_scores_one(text: str, schema: object) -> None:
    assert compute_score("json", text, schema) == {"score": 1.0, "acc": 1.0, "parsed": 1.0}


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("", 0.0),
        ("Ada", 0.0),
        (f"Here it is: {GOOD}", 0.0),
        (f"{GOOD} {GOOD}", 0.0),
        ("{'name': 'Ada'}", 0.0),
        ('{"name": "Ada", "name": "Bob"}', 0.0),
        ('{"name": NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ("9" * 10_000, 0.0),
        ('{"name": 1}', 1.0),
        ('{"name": "Ada", "age": -1}', 1.0),
        ('{"name": "Ada", "city": "London"}', 1.0),
        ("[]", 1.0),
        (f'```json\n{GOOD}\n```\nNo:\n```json\n{{"name": 1}}\n```', 1.0),
    ],
)
def test_invalid_json_scores_zero(text: str, parsed: float) -> None:
    assert compute_score("json", text, PERSON) == {"score": 0.0, "acc": 0.0, "parsed": parsed}


@given(VALUES)
def test_any_value_is_valid_under_its_own_constant_and_no_other_value_is(value: object) -> None:
    text = json.dumps(value)
    assert compute_score("json", text, {"const": value})["score"] == 1.0
    assert compute_score("json", f"```json\n{text}\n```", {"const": [value]})["score"] == 0.0


@given(st.text())
def test_the_last_fenced_block_is_graded(text: str) -> None:
    assert extract_json(f"```json\n1\n```\n```json\n{json.dumps(text)}\n```") == json.dumps(text)


@pytest.mark.parametrize(
    "schema",
    [
        "",
        "no schema",
        "[]",
        {"type": "nonsense"},
        {"type": None},
        {"$ref": "http://localhost:9/schema"},
        {"$ref": "#/x"},
    ],
)
def test_a_ground_truth_that_is_not_a_schema_is_an_error(schema: object) -> None:
    with pytest.raises(RewardError, match="is not a JSON schema") as raised:
        compute_score("json", GOOD, schema)
    assert "write it as JSON text" in str(raised.value)


SLOW = {"^(a|a)*$": {}}  # 28 letters take about a minute without a timeout
TREE = {"type": "array", "items": {"$ref": "#"}}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (TREE, "[" * 900 + "]" * 900),
        ({"type": "string", "pattern": "^(a+)+$"}, json.dumps("a" * 60 + "!")),
        (
            {"type": "object", "patternProperties": {"^(a|a)*$": {}}, "additionalProperties": False},
            json.dumps({"a" * 60 + "!": 1}),
        ),
        ({"additionalProperties": False, "patternProperties": SLOW}, json.dumps({"a" * 28 + "!": 1})),
        (
            {"unevaluatedProperties": False, "$ref": "#/$defs/a", "$defs": {"a": {"patternProperties": SLOW}}},
            json.dumps({"a" * 28 + "!": 1}),
        ),
        ({"type": "number", "multipleOf": 0.01}, "1" + "0" * 4000),
    ],
    ids=["deep", "pattern", "key", "additional", "unevaluated", "number"],
)
def test_a_response_that_is_too_deep_or_slow_to_check_scores_zero(schema: object, text: str) -> None:
    start = time.process_time()
    assert compute_score("s", text, json.dumps(schema))["score"] == 0.0
    assert time.process_time() - start < 10


def test_a_long_list_of_unique_items_does_not_take_forever() -> None:
    items = json.dumps([{"a": index} for index in range(20_000)])
    start = time.process_time()
    compute_score("s", items, json.dumps({"uniqueItems": True}))
    assert time.process_time() - start < 10


def test_patterns_of_usual_schemas_work_as_before() -> None:
    schema = json.dumps({"type": "object", "patternProperties": {"^x_": {"type": "string", "pattern": "b"}}})
    assert compute_score("s", '{"x_1": "abc", "y": 1}', schema)["score"] == 1.0
    assert compute_score("s", '{"x_1": "ac"}', schema)["score"] == 0.0
    assert compute_score("s", '{"x_1": 1}', schema)["score"] == 0.0
