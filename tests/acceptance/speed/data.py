"""A data set that is larger than anybody wants in memory starts at once, and resumes at exactly the next row.

2,000,000 chat prompts in one Parquet file, written as pyarrow does by default (two row groups of about a million rows)
and again with row groups of 8,192. For each, a fresh process does what a run does: settings, checks, order, and the
first 1,024 prompts as token ids, in <= 10 s and <= 500 MB beyond its imports (peak of its resident memory). One prompt
in a hundred is too long and is left out. Then it goes on to the middle of the epoch, saves its place as a checkpoint
would, and reads the next 1,024; a second process that starts from that place must read the very same. Also shown: every
row comes once an epoch, and rows read and tokenised a second. `--short` takes 100,000 rows as pyarrow writes them
and holds no times.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _common import Stopwatch, finish

BATCH = 1024
LAYOUTS: dict[str, dict[str, int]] = {"default": {}, "normal": {"row_group_size": 8192}}


CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_model(folder: Path, texts: list[str]) -> None:
    """What a run reads of a model before it is loaded: a tokenizer, trained on a few texts, and a config."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    marks = ["<|start|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1500, special_tokens=marks, initial_alphabet=alphabet)
    )
    folder.mkdir()
    core.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": core.get_vocab_size()}))


def make(folder: Path, rows: int, layouts: list[str]) -> None:
    """The data in these layouts, and a folder with the tokenizer and the config of a model."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = np.random.RandomState(0).randint(0, 10**6, (rows, 3))
    texts = [
        f"Problem {row}: a shop sells {a} apples and {b} pears on Monday, and {c} times as many of both on Tuesday. "
        "How many pieces of fruit does it sell on both days? Think step by step and write the result after ####."
        + (" Show all your work." * 60 if row % 100 == 7 else "")
        for row, (a, b, c) in enumerate(numbers.tolist())
    ]
    make_model(folder / "model", texts[:2000])

    def struct(**fields: Any) -> pa.Array:
        return pa.StructArray.from_arrays(list(map(pa.array, fields.values())), list(fields))

    table = pa.table(
        {
            "data_source": ["openai/gsm8k"] * rows,
            "prompt": pa.ListArray.from_arrays(
                pa.array(np.arange(rows + 1, dtype=np.int32)), struct(role=["user"] * rows, content=texts)
            ),
            "reward_model": struct(style=["rule"] * rows, ground_truth=[str(n) for n in numbers[:, 0].tolist()]),
            "extra_info": struct(index=np.arange(rows), split=["train"] * rows),
        }
    )
    for layout in layouts:
        pq.write_table(table, folder / f"{layout}.parquet", **LAYOUTS[layout])


class Reader:
    """What a run does of its data: the controller's part, and an episode worker's."""

    def __init__(self, folder: Path, layout: str) -> None:
        from transformers import AutoTokenizer

        from verl.config.load import load_dict
        from verl.data.dataset import PromptDataset
        from verl.data.samplers import PromptStream
        from verl.trainer.build.data import read_data
        from verl.trainer.build.preflight import check_files

        settings = {
            "data": {
                "train_files": str(folder / f"{layout}.parquet"),
                "max_prompt_length": 256,
                "filter_overlong_prompts": True,
                "streaming": True,
            },
            "actor_rollout_ref": {"model": {"path": str(folder / "model")}},
        }
        config = load_dict(settings).config
        check_files(config)
        data = read_data(config)
        self.order, self.stream, self.left_out = data.order, PromptStream(data.order), 0
        train = data.datasets["train"]
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        self.prompts = PromptDataset(train.files, tokenizer, train.options, kept=train.kept)

    def read(self, count: int) -> list[tuple[int, str]]:
        """The next so many prompts that are not too long: the row of each, and a digest of all that is known of it."""
        found: list[tuple[int, str]] = []
        while len(found) < count:
            _, row = next(self.stream)
            prompt = self.prompts[row]
            if prompt is None:
                self.left_out += 1
                continue
            assert prompt.row == prompt.extra_info["index"] == row
            found.append((row, hashlib.sha256(repr(prompt).encode()).hexdigest()))
        return found


def peak_mb() -> float:
    """The most resident memory so far. Not ru_maxrss: that of a child begins with what its parent had."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1000


def first(folder: Path, layout: str) -> dict[str, Any]:
    """The first process, stopped in the middle."""
    import transformers.models.auto.tokenization_auto  # noqa: F401 - imports are not what is measured

    import verl.trainer.build.data  # noqa: F401

    before, watch = peak_mb(), Stopwatch()
    reader = Reader(folder, layout)
    opened_s = watch.seconds()
    reader.read(BATCH)
    figures: dict[str, Any] = {
        "opened_s": opened_s,
        "first_batch_s": watch.seconds(),
        "first_batch_own_s": watch.own_seconds(),
        "memory_mb": peak_mb() - before,
    }
    start, cpu, count = time.perf_counter(), time.process_time(), 4 * BATCH
    reader.read(count)
    figures["rows_per_s"] = count / (time.perf_counter() - start)
    figures["rows_per_cpu_s"] = count / (time.process_time() - cpu)
    while reader.stream.position < reader.order.length // 2:
        next(reader.stream)
    (folder / f"{layout}.json").write_text(json.dumps(reader.stream.state()))
    rows = reader.read(BATCH)
    seen = np.bincount([reader.order.row(place) for place in range(reader.order.length)], minlength=reader.order.length)
    return {
        **figures,
        "memory_mb_later": peak_mb() - before,
        "left_out": reader.left_out,
        "once_an_epoch": bool((seen == 1).all()),
        "rows": rows,
    }


def resumed(folder: Path, layout: str) -> dict[str, Any]:
    """The process that resumes."""
    reader = Reader(folder, layout)
    watch = Stopwatch()
    reader.stream.load(json.loads((folder / f"{layout}.json").read_text()))
    return {"rows": reader.read(BATCH), "resume_s": watch.seconds()}


def in_a_fresh_process(part: str, folder: Path, layout: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--part", part, "--folder", str(folder), "--layout", layout]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(rows: int, layouts: list[str], *, hold_times: bool) -> None:
    passed = True
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, rows, layouts)
        for layout in layouts:
            found = in_a_fresh_process("first", folder, layout)
            again = in_a_fresh_process("resumed", folder, layout)
            found["resumed_exactly"] = found.pop("rows") == again.pop("rows")
            passed &= found["resumed_exactly"] and found["once_an_epoch"] and found["left_out"] > 0
            passed &= 0 < found["memory_mb"] <= 500 and (found["first_batch_own_s"] <= 10 or not hold_times)
            figures |= {f"{layout}_{key}": _short(value) for key, value in {**found, **again}.items()}
            print(figures, flush=True)
    finish("data", passed, rows=rows, **figures)


def _short(value: Any) -> Any:
    return round(value, 2) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--part", choices=["first", "resumed"], help="one process of the proof")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--layout", choices=LAYOUTS)
    options = parser.parse_args()
    if options.part is not None:
        part = first if options.part == "first" else resumed
        print(json.dumps(part(options.folder, options.layout)))
    elif options.short:
        show(100_000, ["default"], hold_times=False)
    else:
        show(2_000_000, list(LAYOUTS), hold_times=True)


if __name__ == "__main__":
    main()
