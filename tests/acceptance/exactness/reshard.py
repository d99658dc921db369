"""A checkpoint belongs to no number of ranks: saved on 2, loaded on 1, 2, 3 and 4, and training goes on all the same.

A Qwen2 with sizes that do not divide evenly is trained for a few updates on 2 ranks, saved in the background while
training goes on, and loaded by other numbers of ranks. Parameters and moments must be equal bit by bit; the losses of
the next updates, on the same mini-batch cut in other ways, equal to 1e-6. With untied and tied embeddings.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import finish
from ranks import free_port, run_ranks
from tiny import tiny_qwen2
from torch.distributed.tensor import DTensor
from transformers import Qwen2ForCausalLM

from verl.algorithms.objective import PolicyObjective
from verl.algorithms.settings import AlgorithmSettings
from verl.checkpoint.background import BackgroundWriter
from verl.checkpoint.manifest import CheckpointDir, find_corruption
from verl.checkpoint.save import load
from verl.data.flat_batch import FlatBatch
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import Schedule

BOUND = 1e-6
BEFORE, AFTER = 3, 3
SEQUENCES = 24
OBJECTIVE = PolicyObjective(AlgorithmSettings(entropy_coeff=0.1, loss_kl_coef=0.2))
Whole = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="on 1 and 3 ranks")
    short = parser.parse_args().short
    worlds, kinds = (1, 3) if short else (1, 2, 3, 4), ("untied", "tied")
    rows, parameters = [], 0
    with tempfile.TemporaryDirectory(prefix="verl-reshard-") as directory:
        for kind in kinds:
            folder = Path(directory, kind)
            torch.manual_seed(0)
            model = Qwen2ForCausalLM(
                tiny_qwen2(vocab_size=131, intermediate_size=150, tie_word_embeddings=kind == "tied")
            )
            model.save_pretrained(folder / "model")
            run_ranks(save_on, 2, 2, free_port(), folder, deadline_s=600)
            assert find_corruption(CheckpointDir(folder).step_dir(BEFORE)) == []
            saved = torch.load(folder / "saved.pt", weights_only=True)
            parameters = sum(tensor.numel() for name, tensor in saved["state"].items() if name.startswith("model."))
            for world in worlds:
                run_ranks(load_on, world, world, free_port(), folder, deadline_s=600)
                found = torch.load(folder / f"loaded-{world}.pt", weights_only=True)
                rows.append(compared(kind, world, saved, found))
                print(rows[-1], flush=True)
    worst = max(row["loss_difference"] for row in rows)
    finish(
        "reshard",
        all(row["different"] == 0 for row in rows) and worst <= BOUND,
        saved_on=2,
        loaded_on=list(worlds),
        kinds=list(kinds),
        tensors_compared=sum(row["tensors"] for row in rows),
        tensors_different=sum(row["different"] for row in rows),
        updates_compared=AFTER * len(rows),
        largest_loss_difference=worst,
        bound=BOUND,
        parameters=parameters,
    )


def compared(kind: str, world: int, saved: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    wanted, loaded = saved["state"], found["state"]
    assert wanted.keys() == loaded.keys()
    differences = [abs(a - b) for a, b in zip(saved["losses"], found["losses"], strict=True)]
    assert all(math.isfinite(loss) and loss for loss in saved["losses"])
    assert len(set(saved["losses"])) > 1, "the updates move something"
    return {
        "kind": kind,
        "ranks": world,
        "tensors": len(wanted),
        "different": sum(not torch.equal(wanted[name], loaded[name]) for name in wanted),
        "loss_difference": max(differences),
    }


def save_on(rank: int, world: int, port: int, folder: Path) -> None:
    engine, mine = joined(rank, world, port, folder)
    for _ in range(BEFORE):
        engine.update(mine, OBJECTIVE)
    checkpoints, writer, state = CheckpointDir(folder), BackgroundWriter(), whole(engine.state())
    if rank == 0:
        checkpoints.begin(BEFORE)
    dist.barrier()
    writer.start({"actor": engine.state()}, checkpoints.step_dir(BEFORE), {})
    losses = [loss_of(engine, mine) for _ in range(AFTER)]  # while it is written
    writer.poll(wait=True)
    if rank == 0:
        torch.save({"state": state, "losses": losses}, folder / "saved.pt")
    dist.destroy_process_group()


def load_on(rank: int, world: int, port: int, folder: Path) -> None:
    engine, mine = joined(rank, world, port, folder)
    engine.load_state(load(engine.state(), CheckpointDir(folder).step_dir(BEFORE) / "actor"))
    state = whole(engine.state())
    losses = [loss_of(engine, mine) for _ in range(AFTER)]
    if rank == 0:
        torch.save({"state": state, "losses": losses}, folder / f"loaded-{world}.pt")
    dist.destroy_process_group()


def joined(rank: int, world: int, port: int, folder: Path) -> tuple[FsdpEngine, list[FlatBatch]]:
    torch.set_num_threads(1)
    init_process_group(rank, world, "127.0.0.1", port)
    torch.manual_seed(rank)
    # A large eps: AdamW would make whole steps of gradients that are nothing but rounding.
    engine = FsdpEngine(
        FsdpSettings(str(folder / "model"), schedule=Schedule(1e-2, "cosine", total_steps=20), eps=1e-3)
    )
    parts = [torch.arange(SEQUENCES)[rank::world][start::2].numpy() for start in range(2)]
    return engine, mini_batch().split(parts)


def loss_of(engine: FsdpEngine, mine: list[FlatBatch]) -> float:
    metrics = engine.update(mine, OBJECTIVE)
    return metrics["actor/pg_loss"] - 0.1 * metrics["actor/entropy"] + 0.2 * metrics["actor/kl_loss"]


def mini_batch() -> FlatBatch:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 30, (SEQUENCES,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    mask = torch.rand(total, generator=generator) < 0.7
    mask[offsets[:-1]] = False
    noise = [torch.randn(total, generator=generator) for _ in range(3)]
    tokens = torch.randint(131, (total,), generator=generator)
    return FlatBatch(tokens, offsets, mask, None, -4.9 + 0.3 * noise[0], -4.9 + 0.3 * noise[1], noise[2])


def whole(state: dict[str, Any], prefix: str = "") -> Whole:
    """Every tensor but the random states of ranks, gathered."""
    found: Whole = {}
    for name, value in state.items():
        if isinstance(value, dict) and (prefix or name != "rng"):
            found |= whole(value, f"{prefix}{name}.")
        elif isinstance(value, DTensor):
            found[prefix + name] = value.full_tensor().clone()
        elif isinstance(value, torch.Tensor):
            found[prefix + name] = value.clone()
    return found


if __name__ == "__main__":
    main()
