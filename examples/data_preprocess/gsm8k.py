"""GSM8K: grade school math problems; the answer is a number after `####`.

python examples/data_preprocess/gsm8k.py --local_dir ~/data/gsm8k
python examples/data_preprocess/gsm8k.py --local_dir ~/data/gsm8k --source raw/gsm8k
"""

from __future__ import annotations

import sys
from typing import Any

from rows import Example, ExampleError, get_field, make_row, prepare

from verl.rewards.scorers.gsm8k import final_number

INSTRUCTION = "Think step by step, and end with `####` and the answer as a plain number."


def convert(example: Example, data_source: str) -> dict[str, Any]:
    question, solution = get_field(example, "question"), get_field(example, "answer")
    number = final_number(solution)
    if number is None:
        raise ExampleError("has a solution without a number after ####")
    messages = [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}]
    return make_row(data_source, messages, str(number), question=question, answer=solution)


if __name__ == "__main__":
    sys.exit(prepare(convert, description=__doc__, data_source="openai/gsm8k", hub=("openai/gsm8k", "main")))
