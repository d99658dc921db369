"""Train every model family, sync it to a real vLLM, save, resume and merge it. Prints one table.

make show-families [ARGS="[--short] [family ...]"]

A tiny random model of each family is trained by the real train worker. Before the first and after the second update its
weights are synced to vLLM, and the log-probs of sequences longer than its window are compared: <= 1e-4 on average in
float32. It is saved, trained further, and resumed in a new worker: the losses are bit-identical. The checkpoint is
merged, which checks names, values and logits, and loaded with `AutoModelForCausalLM`: weights and log-probs equal the
trainer's. `--short`: vLLM only for the two that differ most, Gemma 3 and a mixture of experts.
"""

import argparse
import asyncio
import contextlib
import io
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from _common import finish
from ranks import free_port
from tiny import FAMILIES, WINDOW, chat_tokenizer, save_family
from transformers import AutoModelForCausalLM

from verl.algorithms.objective import sft
from verl.algorithms.settings import AlgorithmSettings
from verl.checkpoint.manifest import CheckpointDir
from verl.commands.models.merge import main as merge
from verl.data.flat_batch import FlatBatch
from verl.errors import VerlError
from verl.rollout.engine import load_weights
from verl.rollout.vllm.engine import VllmEngine
from verl.rollout.vllm.settings import VllmSettings
from verl.training.fsdp.settings import FsdpSettings
from verl.training.settings import Schedule
from verl.weights.bucket import pack
from verl.weights.probe import Probe
from verl.workers.train import TrainSettings, TrainWorker

BOUND = 1e-4
VOCABULARY, STEP = 128, 2
SHORT_WITH_VLLM = ("Gemma 3", "Qwen3-MoE")


def batch():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([2 * WINDOW + 5, 3, WINDOW + 1, 9])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    mask = torch.ones(int(lengths.sum()), dtype=torch.bool)
    mask[offsets[:-1]] = False
    tokens = torch.randint(VOCABULARY, (int(lengths.sum()),), generator=generator)
    return FlatBatch(tokens, offsets, mask)


def started(folder):
    worker = TrainWorker(0, 1)
    actor = FsdpSettings(str(folder / "model"), schedule=Schedule(3e-3))
    worker.start(("127.0.0.1", free_port()), TrainSettings(actor=actor, algorithm=AlgorithmSettings()))
    return worker


def updates(worker, count):
    return [worker._policy.actor.update([batch()], sft) for _ in range(count)]


def distance(one, other):
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


async def published(engine, worker, version, probe):
    """Return the difference between trainer and engine after a weight sync."""
    await load_weights(engine, [*pack(worker._policy.actor.weights(), max_bytes=1 << 20)], version)
    return distance(worker.compute_logprobs(probe), await engine.compute_logprobs(probe))


async def look_at(name, folder, with_vllm):
    """Return one row of the table."""
    save_family(name, folder / "model", vocab_size=VOCABULARY)
    chat_tokenizer().save_pretrained(folder / "model")
    probe = Probe.random(VOCABULARY, tolerance=BOUND, count=3, length=2 * WINDOW + 8).sequences
    row = {"family": name, "parity": None}
    engine = None
    if with_vllm:
        settings = VllmSettings(str(folder / "model"), dtype="float32", max_model_len=64, max_num_seqs=8)
        engine = VllmEngine(settings)
        await engine.start()
    try:
        worker = started(folder)
        gaps = [await published(engine, worker, 0, probe)] if engine else []
        losses = updates(worker, 2)
        gaps += [await published(engine, worker, 1, probe)] if engine else []
        row["parity"] = max(gaps) if gaps else None
    finally:
        if engine is not None:
            await engine.close()
    scores = worker.compute_logprobs(probe)
    held = {each: tensor.clone() for each, tensor in worker._policy.actor._gather_weights(lambda each: True)}
    steps = CheckpointDir(folder / "run")
    steps.begin(STEP)
    worker.save(str(steps.step_dir(STEP)), {})
    worker.poll_save(wait=True)
    after = updates(worker, 2)
    row["trains"] = [each["train/loss"] for each in (*losses, *after)]
    worker.leave()
    worker = started(folder)
    worker.load(str(steps.step_dir(STEP)))
    row["resumes"] = updates(worker, 2) == after
    worker.leave()
    with contextlib.redirect_stdout(io.StringIO()):
        merge(["--local_dir", str(steps.step_dir(STEP) / "actor"), "--target_dir", str(folder / "merged")])
    # "eager", because sdpa of transformers silently ignores the soft cap of Gemma 2.
    loaded = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype="auto", attn_implementation="eager")
    reference = dict(loaded.named_parameters())
    equal = held.keys() == reference.keys() and all(torch.equal(held[each], reference[each]) for each in held)
    with torch.no_grad():
        logits = [loaded(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1) for sequence in probe]
    message = [
        each.gather(-1, torch.tensor(sequence)[1:, None])[:, 0].tolist()
        for each, sequence in zip(logits, probe, strict=True)
    ]
    row["merges"] = equal and distance(message, scores) <= BOUND
    return row


def right(row, with_vllm):
    losses = row["trains"]
    falls = all(after < before for before, after in pairwise(losses))
    return falls and row["resumes"] and row["merges"] and (not with_vllm or row["parity"] <= BOUND)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="vLLM for two families only")
    parser.add_argument("--without-vllm", action="store_true", help="for no family")
    parser.add_argument("families", nargs="*", default=[*FAMILIES])
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    torch.set_num_threads(1)
    rows, good = [], True
    print(f"{'family':10} {'losses of 4 updates':30} {'parity':>8}  resumed  merged  seconds", flush=True)
    with tempfile.TemporaryDirectory(prefix="verl-families-") as directory:
        for name in options.families:
            with_vllm = not options.without_vllm and (not options.short or name in SHORT_WITH_VLLM)
            start = time.monotonic()
            try:
                row = asyncio.run(look_at(name, Path(directory, name), with_vllm))
            except VerlError as error:
                finish("families", False, family=name, error=str(error)[-2000:])
            rows.append(row)
            good = good and right(row, with_vllm)
            losses = " ".join(f"{loss:.4f}" for loss in row["trains"])
            parity = "-" if row["parity"] is None else f"{row['parity']:.1e}"
            seconds = time.monotonic() - start
            print(
                f"{name:10} {losses:30} {parity:>8}  {row['resumes']!s:7}  {row['merges']!s:6}  {seconds:.0f}",
                flush=True,
            )
    finish(
        "families",
        good,
        families=[row["family"] for row in rows],
        parity={row["family"]: row["parity"] for row in rows if row["parity"] is not None},
        bound=BOUND,
        resumed=sum(row["resumes"] for row in rows),
        merged=sum(row["merges"] for row in rows),
    )


if __name__ == "__main__":
    main()
