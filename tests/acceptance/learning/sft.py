"""Supervised training against a plain PyTorch loop, on 1 and 2 ranks, and its speed beside TRL's.

100 steps on the same examples in the same order: a loop that a reader can check (the model of transformers, padding,
cross-entropy, AdamW, a schedule) and `verl.sft.model` on 1 and on 2 ranks must have the same losses to 1e-5.
Then tokens a second on long-tailed lengths beside TRL's SFTTrainer, in turns on the same machine: same model, same
batch size, float32, one thread; we pack within a budget of tokens, TRL pads, as by default. We must be 1.3 times
as fast.

`--short` (CI): fewer steps, without TRL, which needs an environment of its own (made once, under ~/.cache/verl).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from _common import finish
from _trl_environment import trl_python
from ranks import free_port, run_ranks
from tiny import chat_tokenizer, tiny_qwen2
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from verl.data.micro_batches import MicroBatchLimit
from verl.sft.examples import Example
from verl.sft.model import SFTModel
from verl.sft.trainer import split_batch
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import Schedule

T = TypeVar("T")
ALLOWED, FASTER = 1e-5, 1.3
BATCH, STEPS, WARMUP = 8, 100, 10
SPEED_BATCH, SPEED_STEPS, ROUNDS, WARM = 16, 10, 3, 2
LR, WEIGHT_DECAY, CLIP = 1e-3, 0.01, 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--speed", nargs=3, help=argparse.SUPPRESS)  # this process measures us: MODEL EXAMPLES STEPS
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.speed:
        model, examples, steps = options.speed
        run_ranks(_measured, 1, free_port(), model, Path(examples), int(steps), deadline_s=600)
        return
    steps = 25 if options.short else STEPS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        Qwen2ForCausalLM(tiny_qwen2()).save_pretrained(folder / "model")
        examples = make_examples(BATCH * steps, 64, median=20, longest=120)
        plain = plain_losses(folder / "model", examples, steps)
        ours = {ranks: our_losses(folder, examples, steps, ranks) for ranks in (1, 2)}
        gaps = {ranks: max(abs(a - b) for a, b in zip(plain, found, strict=True)) for ranks, found in ours.items()}
        print(f"losses from {plain[0]:.4f} to {plain[-1]:.4f}; largest difference over {steps} steps: {gaps}")
        figures: dict[str, Any] = {
            "steps": steps,
            "first_loss": round(plain[0], 4),
            "last_loss": round(plain[-1], 4),
            "worst_1_rank": gaps[1],
            "worst_2_ranks": gaps[2],
            "ranks_apart": max(abs(a - b) for a, b in zip(ours[1], ours[2], strict=True)),
            "allowed": ALLOWED,
        }
        passed = max(gaps.values()) <= ALLOWED and plain[-1] < plain[0]
        if not options.short:
            figures |= beside_trl(folder)
            passed = passed and figures["times_trl"] >= FASTER
    finish("sft", passed, **figures)


def make_examples(count: int, vocabulary: int, *, median: int, longest: int, seed: int = 0) -> list[Example]:
    """Random walks over the vocabulary, of long-tailed lengths: something to learn, and much to pad."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = int(np.clip(random.lognormal(math.log(median), 0.9), 6, longest))
        tokens = np.cumsum(random.integers(1, 4, length)) % vocabulary
        found.append(Example(tokens.astype(np.int32), np.arange(length) >= max(1, length // 4)))
    return found


def in_batches(items: list[T], size: int) -> list[list[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def plain_losses(model_path: Path, examples: list[Example], steps: int) -> list[float]:
    """The loop that everybody would write: no packing, no ranks, no framework."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    losses = []
    for step, batch in enumerate(in_batches(examples, BATCH)):
        longest = max(len(example.tokens) for example in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        labels, attention = torch.full_like(tokens, -100), torch.zeros_like(tokens)
        for row, example in enumerate(batch):
            size = len(example.tokens)
            tokens[row, :size] = torch.from_numpy(example.tokens)
            attention[row, :size] = 1
            labels[row, :size] = torch.where(torch.from_numpy(example.mask), tokens[row, :size], -100)
        logits = model(input_ids=tokens, attention_mask=attention).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        done = (step - WARMUP) / (steps - WARMUP)
        rate = LR * ((step + 1) / WARMUP if step < WARMUP else 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def our_losses(folder: Path, examples: list[Example], steps: int, ranks: int) -> list[float]:
    torch.save([(example.tokens, example.mask) for example in examples], folder / "examples.pt")
    run_ranks(_trained, ranks, ranks, free_port(), folder, steps, deadline_s=600)
    return json.loads((folder / f"losses_{ranks}.json").read_text())


def _trained(rank: int, ranks: int, port: int, folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    init_process_group(rank, ranks, "127.0.0.1", port)
    settings = FsdpSettings(
        str(folder / "model"),
        role="train",
        schedule=Schedule(LR, "cosine", WARMUP, steps),
        weight_decay=WEIGHT_DECAY,
        grad_clip=CLIP,
    )
    model = SFTModel(FsdpEngine(settings))
    examples = [Example(*parts) for parts in torch.load(folder / "examples.pt", weights_only=False)]
    cut = partial(split_batch, ranks=ranks, limit=MicroBatchLimit(samples=None, tokens=160))
    losses = [model.update(cut(batch)[rank])["train/loss"] for batch in in_batches(examples, BATCH)]
    if rank == 0:
        (folder / f"losses_{ranks}.json").write_text(json.dumps(losses))


def beside_trl(folder: Path) -> dict[str, Any]:
    """In turns, so that whatever else the machine does meets both; medians over the rounds."""
    python = trl_python()
    config = tiny_qwen2(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "larger")
    tokenizer = chat_tokenizer()
    tokenizer.pad_token = tokenizer.unk_token
    tokenizer.save_pretrained(folder / "larger")
    examples = make_examples(SPEED_BATCH * SPEED_STEPS, 4096, median=60, longest=512)
    rows = [(example.tokens.tolist(), example.mask.astype(int).tolist()) for example in examples]
    (folder / "rows.json").write_text(json.dumps(rows))
    paths = [str(folder / "larger"), str(folder / "rows.json")]
    commands = {
        "ours": [sys.executable, __file__, "--speed", *paths, str(SPEED_STEPS)],
        "trl": [str(python), str(Path(__file__).with_name("_trl_sft.py")), *paths, str(SPEED_BATCH), str(SPEED_STEPS)],
    }
    speeds: dict[str, list[float]] = {name: [] for name in commands}
    by_cpu: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, command in commands.items():
            done = subprocess.run(command, capture_output=True, text=True, env=_alone(name), timeout=600)
            if done.returncode:
                raise SystemExit(f"{name}: {done.stdout}\n{done.stderr}")
            found = json.loads(done.stdout.splitlines()[-1])
            speeds[name].append(found["tokens"] / found["seconds"])
            by_cpu[name].append(found["tokens"] / found["cpu_seconds"])
            print(
                f"{name:5} {speeds[name][-1]:8.0f} tokens/s, {by_cpu[name][-1]:8.0f} a second of CPU time", flush=True
            )
    ours, trl = (statistics.median(speeds[name]) for name in commands)
    ours_cpu, trl_cpu = (statistics.median(by_cpu[name]) for name in commands)
    lengths = [len(example.tokens) for example in examples]
    padded = sum(len(batch) * max(batch) for batch in in_batches(lengths, SPEED_BATCH))
    return {
        "tokens_per_s": round(ours),
        "trl_tokens_per_s": round(trl),
        "times_trl": round(ours / trl, 2),
        "times_trl_by_cpu_time": round(ours_cpu / trl_cpu, 2),
        "faster_wanted": FASTER,
        "mean_length": round(statistics.mean(lengths)),
        "longest": max(lengths),
        "padding_share": round(1 - sum(lengths) / padded, 2),
        "rounds": ROUNDS,
    }


def _measured(rank: int, port: int, model_path: str, examples_path: Path, steps: int) -> None:
    torch.set_num_threads(1)
    init_process_group(rank, 1, "127.0.0.1", port)
    model = SFTModel(FsdpEngine(FsdpSettings(model_path, role="train", schedule=Schedule(1e-4))))
    rows = json.loads(examples_path.read_text())
    examples = [Example(np.array(tokens, np.int32), np.array(mask, bool)) for tokens, mask in rows]
    batches = in_batches(examples, SPEED_BATCH)[:steps]
    seconds, cpu = 0.0, 0.0
    for step, batch in enumerate(batches):
        if step == WARM:
            seconds, cpu = time.perf_counter(), time.process_time()
        model.update(split_batch(batch, 1, MicroBatchLimit(samples=None, tokens=2048))[0])
    tokens = sum(len(example.tokens) for batch in batches[WARM:] for example in batch)
    spent = {"seconds": time.perf_counter() - seconds, "cpu_seconds": time.process_time() - cpu}
    print(json.dumps({**spent, "tokens": tokens}), flush=True)


def _alone(name: str) -> dict[str, str]:
    """One thread for each; TRL sees nothing of ours."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV"} if name == "trl" else set()
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    return kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    main()
