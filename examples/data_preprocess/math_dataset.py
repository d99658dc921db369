r"""MATH and similar data: a problem, and a solution with its answer in `\boxed{...}`, or the answer itself.

python examples/data_preprocess/math_dataset.py --local_dir ~/data/math
python examples/data_preprocess/math_dataset.py --source problems.jsonl --data_source math
"""

from __future__ import annotations

import sys
from typing import Any

from rows import Example, ExampleError, get_field, make_row, prepare

from verl.rewards.scorers.math import last_boxed

INSTRUCTION = r"Think step by step, and put the final answer in \boxed{}."


def convert(example: Example, data_source: str) -> dict[str, Any]:
    problem, solution = get_field(example, "problem", "question"), get_field(example, "solution", "answer")
    answer = last_boxed(solution)
    if answer is None and (answer := example.get("answer")) is None:
        raise ExampleError(r"has a solution without \boxed{...}, and no answer")
    extra = {name: example[name] for name in ("level", "type", "subject") if example.get(name) is not None}
    messages = [{"role": "user", "content": f"{problem}\n\n{INSTRUCTION}"}]
    return make_row(data_source, messages, str(answer), solution=solution, **extra)


if __name__ == "__main__":
    hub = "DigitalLearningGmbH/MATH-lighteval"
    sys.exit(prepare(convert, description=__doc__, data_source=hub, hub=(hub,)))
