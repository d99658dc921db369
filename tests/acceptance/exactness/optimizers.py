"""8-bit AdamW and Muon learn, resume with the same bits on another number of ranks, and take the memory they should.

make show-optimizers [ARGS=--short]

1. Learning: supervised steps of a tiny model on two-digit sums, at AdamW's learning rate, until half of the held-out
   problems are solved; the number of steps of each optimizer. Then, without `--short`, steps of GRPO from there.
2. Checkpoints, with shards of different sizes: trained and saved on 1 rank, loaded and saved again on 2, loaded on 1.
   Weights and optimizer state must be equal bit by bit each time; the next updates bit by bit equal to those of the run
   that went on (on 1 rank), and within a bound (on 2).
3. Bytes of optimizer state per parameter.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import finish, metrics_of, sized_for_addition, train
from ranks import free_port, run_ranks
from reshard import OBJECTIVE, SEQUENCES, loss_of, mini_batch, whole
from tiny import tiny_qwen2
from transformers import Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from verl.checkpoint.save import load, save
from verl.data.flat_batch import FlatBatch
from verl.demo.assets import make_assets
from verl.demo.warmup import warm_up
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import Schedule

OPTIMIZERS = ("adamw", "adamw_8bit", "muon")
BYTES = {"adamw": 8.0, "adamw_8bit": 2.1, "muon": 5.0}
"""Most bytes of optimizer state per parameter."""
LOSS_BOUNDS = {"adamw": 1e-6, "adamw_8bit": 1e-5, "muon": 1e-6}
"""Of the next losses on 2 ranks: float error of a gradient may change a value that lies between two codes."""
BEFORE, AFTER = 3, 3
TARGET, MAX_STEPS = 0.5, 400
GRPO_STEPS = 24
METRIC = "val/addition/mean@1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--short", action="store_true", help="no GRPO, a lower target, and without AdamW to compare with"
    )
    short = parser.parse_args().short
    disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="verl-optimizers-") as directory:
        folder = Path(directory)
        checkpoints = check_checkpoints(folder)
        names = OPTIMIZERS[1:] if short else OPTIMIZERS
        learned = {name: learn(folder / f"sums-{name}", name, short=short) for name in names}
        rl = {} if short else {name: reinforce(folder / f"sums-{name}", name) for name in OPTIMIZERS[1:]}
    passed = [
        all(
            each["different"] == 0 and each["loss_difference"] <= LOSS_BOUNDS[name]
            for name, each in checkpoints.items()
        ),
        all(each["resumed_equal"] for each in checkpoints.values()),
        all(each["bytes"] <= BYTES[name] for name, each in checkpoints.items()),
        all(each["after"] >= (0.1 if short else TARGET - 0.05) for each in learned.values()),
        all(accuracy[-1] - accuracy[0] >= 0.1 for accuracy in rl.values()),
    ]
    finish(
        "optimizers",
        all(passed),
        checks=passed,
        supervised=learned,
        grpo=rl,
        checkpoints=checkpoints,
    )


def learn(folder: Path, optimizer: str, *, short: bool) -> dict[str, float]:
    """Train supervised until the target; the model in `folder` is then the start of reinforcement learning."""
    make_assets(folder)
    before = warm_up(folder, max_steps=0).accuracy
    result = warm_up(folder, target=0.15 if short else TARGET, max_steps=MAX_STEPS, optimizer=optimizer)
    print(f"{optimizer}: {result}", flush=True)
    return {"before": round(before, 3), "after": round(result.accuracy, 3), "steps": result.steps}


def reinforce(folder: Path, optimizer: str) -> list[float]:
    """Return held-out accuracy before and after some steps of GRPO."""
    code, _ = train(
        *sized_for_addition(folder),
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
        f"actor_rollout_ref.actor.optim.name={optimizer}",
        "actor_rollout_ref.rollout.n=8",
        "trainer.deterministic=True",
        f"trainer.total_training_steps={GRPO_STEPS}",
        f"trainer.test_freq={GRPO_STEPS}",
        "trainer.save_freq=-1",
        deadline_s=1200,
    )
    lines = metrics_of(folder / "run") if code == 0 else []
    accuracy = [round(line[METRIC], 3) for line in lines if METRIC in line]
    return accuracy if len(accuracy) > 1 else [1.0, 0.0]


def check_checkpoints(folder: Path) -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    config = tiny_qwen2(vocab_size=131, hidden_size=256, intermediate_size=301, num_hidden_layers=1)
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        first = {name: save_first(folder, name) for name in OPTIMIZERS}
        run_ranks(on_two_ranks, 2, free_port(), folder, deadline_s=600)
        second = torch.load(folder / "two.pt", weights_only=True)
        third = {name: resume(folder, name, "two") for name in OPTIMIZERS}
    finally:
        dist.destroy_process_group()
    rows = {}
    for name in OPTIMIZERS:
        saved, losses = first[name]["state"], first[name]["losses"]
        copies = [each[name]["state"] for each in (second, third)]
        assert all(copy.keys() == saved.keys() for copy in copies)
        rows[name] = {
            "tensors": len(saved),
            "different": sum(not is_same(copy[key], saved[key]) for copy in copies for key in saved),
            "resumed_equal": third[name]["losses"] == losses and len(set(losses)) == AFTER,
            "loss_difference": max(abs(a - b) for a, b in zip(second[name]["losses"], losses, strict=True)),
            "bytes": round(first[name]["bytes"], 3),
        }
        print(f"{name}: {rows[name]}", flush=True)
    return rows


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def save_first(folder: Path, optimizer: str) -> dict[str, Any]:
    """Train on 1 rank, save, and train on."""
    engine, mine = build(folder, optimizer)
    for _ in range(BEFORE):
        engine.update(mine, OBJECTIVE)
    save(engine.state(), folder / f"one-{optimizer}")
    state, size = whole(engine.state()), sum(parameter.numel() for parameter in engine.model.parameters())
    moments = [tensor for name, tensor in state.items() if name.startswith("optimizer.state.") and tensor.ndim]
    losses = [loss_of(engine, mine) for _ in range(AFTER)]
    return {"state": state, "losses": losses, "bytes": sum(each.nbytes for each in moments) / size}


def on_two_ranks(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port)
    results = {name: resume(folder, name, "one", save_as="two") for name in OPTIMIZERS}
    if rank == 0:
        torch.save(results, folder / "two.pt")
    dist.destroy_process_group()


def resume(folder: Path, optimizer: str, source: str, save_as: str | None = None) -> dict[str, Any]:
    engine, mine = build(folder, optimizer)
    engine.load_state(load(engine.state(), folder / f"{source}-{optimizer}"))
    if save_as is not None:
        save(engine.state(), folder / f"{save_as}-{optimizer}")
    return {"state": whole(engine.state()), "losses": [loss_of(engine, mine) for _ in range(AFTER)]}


def build(folder: Path, optimizer: str) -> tuple[FsdpEngine, list[FlatBatch]]:
    # A large eps: AdamW would make whole steps of gradients that are nothing but rounding.
    options = {"schedule": Schedule(1e-2, "cosine", total_steps=20), "eps": 1e-3, "optimizer": optimizer}
    engine = FsdpEngine(FsdpSettings(str(folder / "model"), **options))
    parts = [torch.arange(SEQUENCES)[engine.rank :: engine.world_size][start::2].numpy() for start in range(2)]
    return engine, mini_batch().split(parts)


if __name__ == "__main__":
    main()
