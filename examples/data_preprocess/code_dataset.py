"""Code with tests: MBPP and similar data, in any form that `verl.rewards.scorers.code` supports.

    python examples/data_preprocess/code_dataset.py --local_dir ~/data/mbpp
    python examples/data_preprocess/code_dataset.py --source apps/ --data_source apps

The tests of an example are `test_list` (with `test_setup_code`), `inputs` and `outputs` (with `fn_name`; also as JSON
in `input_output`), or `test` and `entry_point`. They become JSON text: Parquet needs the same fields in all rows.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from rows import Example, ExampleError, get_field, make_row, prepare

from verl.errors import RewardError
from verl.rewards.scorers.code import read_tests

INSTRUCTION = "Write a solution in Python, in one block between ```python and ```."
TESTS = ("inputs", "outputs", "fn_name", "test_list", "test_setup_code", "assert_case", "setup", "test", "entry_point")


def convert(example: Example, data_source: str) -> dict[str, Any]:
    problem = get_field(example, "question", "problem", "text", "prompt")
    tests = {name: example[name] for name in TESTS if example.get(name) is not None}
    if isinstance(packed := example.get("input_output"), str) and packed:
        tests |= json.loads(packed)
    truth = json.dumps(tests, ensure_ascii=False)
    try:
        asserts = read_tests(truth, data_source).asserts
    except RewardError as error:
        raise ExampleError(f"has no usable tests: {error}") from None
    # A test shows the name of the function.
    shown = f"\n\nIt must pass this test:\n{asserts[0]}" if "test_list" in tests else ""
    messages = [{"role": "user", "content": f"{problem}{shown}\n\n{INSTRUCTION}"}]
    solution = example.get("code") or example.get("canonical_solution") or ""
    return make_row(data_source, messages, truth, solution=solution)


if __name__ == "__main__":
    hub = ("google-research-datasets/mbpp", "full")
    sys.exit(prepare(convert, description=__doc__, data_source="mbpp", hub=hub))
