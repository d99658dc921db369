"""The folder of a run that never took place, with all files of a real one: a model that learns to use a calculator."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

RESPONSES = 8
BEGAN = 1_790_000_000.0
WORKERS = ("controller", "train 0", "train 1", "rollout 0", "rollout 1")
HOSTILE = "</script><script>window.hacked=true</script><img src=x onerror='window.hacked=true'>"
"""Text that must stay text wherever it appears."""
SCHEMA = pa.schema(
    {
        "step": pa.int32(),
        "split": pa.string(),
        "group": pa.int64(),
        "index": pa.int32(),
        "branch": pa.int32(),
        "row": pa.int64(),
        "data_source": pa.string(),
        "ground_truth": pa.string(),
        "prompt": pa.string(),
        "response": pa.string(),
        "score": pa.float64(),
        "metrics": pa.map_(pa.string(), pa.float64()),
        "finish_reason": pa.string(),
        "engines": pa.list_(pa.int32()),
        "started": pa.float64(),
        "generated": pa.float64(),
        "scored": pa.float64(),
        "token_ids": pa.list_(pa.int32()),
        "pieces": pa.list_(pa.string()),
        "mask": pa.list_(pa.bool_()),
        "versions": pa.list_(pa.int32()),
        "rollout_logprobs": pa.list_(pa.float32()),
        "logprobs": pa.list_(pa.float32()),
        "advantages": pa.list_(pa.float32()),
        "entropies": pa.list_(pa.float32()),
    }
)
_TOKEN = re.compile(r"<\|\w+\|>| ?\w+|\s+|[^\w\s]")
_OPENINGS = ("Let me think step by step.", "First I look at what is given.", "I need to be careful here.", "Okay.")
_THOUGHTS = (
    "The {a} crates hold {b} apples each, so I multiply.",
    "Adding {a} and {b} by hand is easy to get wrong, so I check it.",
    "Wait, I should read the question again: it asks for the total, not for the difference.",
    "The carry from the tens goes to the hundreds.",
    "Rounding {a} to the nearest ten gives an estimate that the result has to be close to.",
    "This agrees with the estimate, so I am fairly confident.",
    "Another way is to split {b} into tens and units and to add the parts.",
)


@dataclass(frozen=True)
class Size:
    """How large a run is: steps, groups of each training file, and prompts of each validation file."""

    steps: int = 100
    groups: int = 23
    validation: int = 160
    validation_every: int = 10


def write_run(folder: Path, size: Size, *, is_hostile: bool = False, is_killed: bool = False) -> int:
    """Write the files of a run; returns how many samples they have.

    Args:
        folder: Created if necessary.
        size: Steps and samples.
        is_hostile: Some prompts, responses and names of metrics are HTML that would run scripts.
        is_killed: The last line of every file of records is cut off, and a sample file was not finished.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    _write_lines(folder / "metrics.jsonl", list(_make_metrics(rng, size, is_hostile)), is_killed)
    _write_lines(folder / "warnings.jsonl", list(_make_warnings(size, is_hostile)), is_killed)
    _write_lines(folder / "phases.jsonl", list(_make_phases(rng, size)), is_killed)
    _write_lines(folder / "starts.jsonl", _make_starts(size), is_killed)
    (folder / "settings.yaml").write_text(_SETTINGS)
    (folder / "samples").mkdir(exist_ok=True)
    count = 0
    for step in range(1, size.steps + 1):
        for split, groups in (("train", size.groups), ("val", size.validation)):
            if split == "val" and step % size.validation_every:
                continue
            rows = list(_make_samples(rng, step, size.steps, split, groups, is_hostile))
            count += len(rows)
            table = pa.Table.from_pylist(rows, SCHEMA)
            pq.write_table(table, folder / "samples" / f"{split}_{step:08}.parquet", compression="zstd")
    if is_killed:
        (folder / "samples" / ".train_00000999.parquet.tmp").write_bytes(b"PAR1 and then nothing")
    return count


def _write_lines(path: Path, records: Sequence[dict[str, Any]], is_truncated: bool) -> None:
    text = "".join(f"{json.dumps(record)}\n" for record in records)
    path.write_text(text + text.splitlines()[-1][: -len("}}}")] if is_truncated else text)


def _progress(step: int, steps: int) -> float:
    return 1 - np.exp(-3.2 * step / steps)


def _make_metrics(rng: random.Random, size: Size, is_hostile: bool) -> Iterator[dict[str, Any]]:
    time = BEGAN + 40
    for step in range(1, size.steps + 1):
        done, noise = _progress(step, size.steps), lambda scale: rng.gauss(0, scale)
        times = _phase_seconds(rng, step, size.steps)
        time += sum(times.values()) + 0.4
        reward = min(1.0, max(0.0, 0.12 + 0.75 * done + noise(0.03)))
        length = 190 - 60 * done + noise(5)
        tokens = 8 * size.groups * length
        values: dict[str, Any] = {
            "reward/mean": reward,
            "reward/std": (reward * (1 - reward)) ** 0.5,
            "reward/min": 0.0,
            "reward/max": 1.0,
            "reward/groups_without_signal": max(0.0, 0.35 * abs(2 * reward - 1) + noise(0.03)),
            "critic/advantages/mean": noise(0.01),
            "actor/kl_loss": 0.0004 * step + abs(noise(0.002)),
            "actor/ppo_kl": abs(noise(0.0006)),
            "actor/entropy": 0.92 - 0.55 * done + noise(0.012),
            "actor/grad_norm": 0.85 - 0.35 * done + abs(noise(0.08)) + (2.4 if step == int(size.steps * 0.62) else 0),
            "actor/pg_loss": noise(0.02),
            "actor/pg_clipfrac": abs(noise(0.004)),
            "actor/lr": 1e-6 * min(1.0, step / 10),
            "response_length/mean": length,
            "response_length/max": 256.0,
            "response_length/clip_ratio": max(0.0, 0.12 - 0.1 * done + noise(0.01)),
            "episode/turns": 2.2 - 0.4 * done + noise(0.05),
            "training/rollout_probs_diff_mean": 0.0021 + abs(noise(0.0004)),
            "training/rollout_probs_corr": 0.9993 + noise(0.0001),
            "weights/probe_gap": 1e-5 + abs(noise(2e-6)),
            "training/staleness": float(rng.random() < 0.4),
            **{f"timing_s/{name}": seconds for name, seconds in times.items()},
            "timing_s/step": sum(times.values()) + 0.4,
            "perf/throughput": tokens / (sum(times.values()) + 0.4),
            "perf/tokens_per_s/gen": tokens / times["gen"],
            "perf/controller_rss_gib": 0.63 + 0.0004 * step,
            "plan/tokens": tokens,
            "plan/imbalance": 1 + abs(noise(0.004)),
        }
        if step == int(size.steps * 0.62):
            values["actor/pg_loss"] = "NaN"
        if is_hostile:
            values[f"reward/{HOSTILE}"] = reward
        yield {"step": step, "time": round(time, 3), **values}
        if step % size.validation_every == 0:
            yield {
                "step": step,
                "time": round(time + 5, 3),
                "val/sums/mean@1": min(1.0, 0.1 + 0.72 * done + noise(0.015)),
                "val/stories/mean@1": max(0.0, 0.05 + 0.5 * done + noise(0.02)),
                "timing_s/validation": 5 + abs(noise(0.4)),
            }


def _phase_seconds(rng: random.Random, step: int, steps: int) -> dict[str, float]:
    shrink = 1 - 0.3 * _progress(step, steps)
    return {
        "gen": 19.5 * shrink + rng.gauss(0, 0.8),
        "plan": 0.05,
        "sleep": 0.4,
        "prepare": 4.2 * shrink + rng.gauss(0, 0.2),
        "update": 13.5 * shrink + rng.gauss(0, 0.4),
        "sync": 2.2 + abs(rng.gauss(0, 0.2)),
    }


def _make_warnings(size: Size, is_hostile: bool) -> Iterator[dict[str, Any]]:
    step = int(size.steps * 0.62)
    yield {
        "step": step,
        "time": BEGAN + 40 * step,
        "text": "1 optimizer step(s) were skipped: the gradient was not finite; check reward/min and reward/max for "
        "outliers; try a lower actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.grad_clip=0.5",
        "rule": "skipped-steps",
    }
    yield {
        "step": int(size.steps * 0.15),
        "time": BEGAN + 600,
        "text": f"the reward function returned a name that is HTML: {HOSTILE}"
        if is_hostile
        else "12% of the responses were truncated by the length limit; try a larger data.max_response_length",
    }


def _make_phases(rng: random.Random, size: Size) -> Iterator[dict[str, Any]]:
    start = BEGAN
    for step in range(1, size.steps + 1):
        times, rows = _phase_seconds(rng, step, size.steps), []
        for name, seconds in times.items():
            rows.append(["controller", name, start, start + seconds])
            for worker in WORKERS[1:]:
                if ("rollout" in worker) == (name == "gen") or name == "sync":
                    rows.append([worker, name, start, start + seconds * rng.uniform(0.78, 1.0)])
            start += seconds
        yield {"step": step, "time": start, "phases": rows}


def _make_starts(size: Size) -> list[dict[str, Any]]:
    command = "verl train data.train_files=train.parquet actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct"
    start = {
        "total_steps": size.steps,
        "command": command,
        "settings": {
            "data.train_files": {"value": "train.parquet", "origin": "command line"},
            "actor_rollout_ref.model.path": {"value": "Qwen/Qwen2.5-0.5B-Instruct", "origin": "command line"},
            "actor_rollout_ref.rollout.n": {"value": RESPONSES, "origin": "sums.yaml"},
            "actor_rollout_ref.actor.use_kl_loss": {"value": True, "origin": "sums.yaml"},
            "trainer.total_training_steps": {"value": size.steps, "origin": "command line"},
        },
        "environment": {
            "versions": {"verl": "0.1.0", "python": "3.11.9", "torch": "2.12.0", "vllm": "0.32.0", "ray": "2.59.0"},
            "machine": {"system": "Linux", "cores": "8 of 8 usable", "memory": "48.0 of 64.0 GiB free"},
            "accelerators": {},
        },
    }
    resumed = size.steps // 2
    return [{"step": 0, "time": BEGAN, **start}, {"step": resumed, "time": BEGAN + 40 * resumed, **start}]


_SETTINGS = """\
data:
  train_files: train.parquet                          # command line
  max_prompt_length: 512                              # default
  max_response_length: 256                            # sums.yaml

actor_rollout_ref:
  model:
    path: Qwen/Qwen2.5-0.5B-Instruct                  # command line
  actor:
    use_kl_loss: true                                 # sums.yaml
    optim:
      lr: 1.0e-06                                     # default
      betas: [0.9, 0.999]                             # default
  rollout:
    n: 8                                              # sums.yaml
    engine_kwargs:
      vllm: {}                                        # default

trainer:
  logger: [console, jsonl]                            # default
  total_training_steps: null                          # default
"""


_WITHOUT_TRAINER = dict.fromkeys(("logprobs", "advantages", "entropies"))


def _make_samples(
    rng: random.Random, step: int, steps: int, split: str, groups: int, is_hostile: bool
) -> Iterator[dict[str, Any]]:
    done = _progress(step, steps)
    for group in range(groups):
        a, b = rng.randrange(100, 999), rng.randrange(100, 999)
        question = f"A shop sells {a} apples on Monday and {b} on Tuesday. How many apples does it sell in all?"
        if is_hostile and group == 0:
            question += HOSTILE
        prompt = (
            "<|im_start|>system\nYou are a careful assistant with a calculator.<|im_end|>\n"
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        members = range(RESPONSES if split == "train" else 1)
        is_right = [rng.random() < 0.15 + 0.75 * done for _ in members]
        mean = sum(is_right) / len(is_right)
        std = (mean * (1 - mean)) ** 0.5 + 1e-6
        for index in members:
            advantage = (is_right[index] - mean) / std
            yield {
                "step": step,
                "split": split,
                "group": step * groups + group if split == "train" else group,
                "index": index,
                "branch": 0,
                "row": (step * groups + group) % 7473,
                "data_source": "sums" if group % 3 else "stories",
                "ground_truth": str(a + b),
                "prompt": prompt,
                "score": float(is_right[index]),
                "metrics": [("format", 1.0), ("steps", float(rng.randrange(2, 6)))],
                "finish_reason": "stop" if rng.random() < 0.95 else "length",
                "engines": [rng.randrange(2)],
                "started": BEGAN + step * 40,
                "generated": BEGAN + step * 40 + rng.uniform(4, 19),
                "scored": BEGAN + step * 40 + 19.1,
                **_make_response(rng, prompt, a, b, is_right[index], advantage, step, is_hostile and group == 0),
                **({} if split == "train" else _WITHOUT_TRAINER),
            }


def _make_response(
    rng: random.Random, prompt: str, a: int, b: int, is_right: bool, advantage: float, step: int, hostile: bool
) -> dict[str, Any]:
    """Return the columns of a response. Validation has no advantages, and no numbers of the trainer."""
    result = a + b if is_right else a + b + rng.choice((-100, -10, 10, 100))
    thoughts = " ".join(_think(rng, a, b) for _ in range(rng.randrange(3, 9)))
    call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{a}+{b}"}}}}</tool_call>'
    segments = [(f"{rng.choice(_OPENINGS)} {thoughts}\n", True)]
    if rng.random() < 0.5:
        reply = f"\n<|im_start|>tool\n{a + b}<|im_end|>\n<|im_start|>assistant\n"
        segments += [(f"{call}<|im_end|>", True), (reply, False)]
        segments += [("The tool agrees with what I expected. ", True)]
    segments += [(f"{HOSTILE if hostile else ''}The answer is \\boxed{{{result}}}.<|im_end|>", True)]
    pieces, mask = [], []
    for text, is_generated in [(prompt, False), *segments]:
        found = _TOKEN.findall(text)
        pieces += found
        mask += [is_generated] * len(found)
    generated, noise = np.array(mask), np.random.default_rng(rng.getrandbits(32))
    rollout = np.where(generated, -3 * noise.normal(0, 0.35, len(mask)) ** 2, 0).astype(np.float32)
    gaps = noise.normal(0, 0.004, len(mask)) + noise.normal(0, 0.03, len(mask)) * (noise.random(len(mask)) < 0.03)
    older = (np.arange(len(mask)) % 97 < 20) & (step > 1)
    return {
        "response": "".join(text for text, _ in segments),
        "token_ids": [hash_token(piece) for piece in pieces],
        "pieces": pieces,
        "mask": mask,
        "versions": np.where(generated, step - 1 - older, -1).astype(np.int32),
        "rollout_logprobs": rollout,
        "logprobs": np.where(generated, rollout + gaps, 0).astype(np.float32),
        "advantages": np.where(generated, advantage, 0).astype(np.float32),
        "entropies": np.where(generated, abs(noise.normal(0, 0.05, len(mask))) - 0.8 * rollout, 0).astype(np.float32),
    }


def _think(rng: random.Random, a: int, b: int) -> str:
    x, y = rng.randrange(10, 10_000), rng.randrange(10, 10_000)
    return f"{rng.choice(_THOUGHTS).format(a=a, b=b)} {x} + {y} = {x + y}."


@cache
def hash_token(piece: str) -> int:
    """Return an id for a token, the same in every process."""
    return sum(ord(letter) * 31**place for place, letter in enumerate(piece[:8])) % 150_000
