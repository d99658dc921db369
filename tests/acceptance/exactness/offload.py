"""Measure what each memory setting saves, and check that it changes no result: one model, two ranks.

make show-offload [ARGS=--short]

Counts the bytes of all live tensors after every torch operation: those that would be on the device, and separately
those that a setting puts into host memory. Without an accelerator both are the same memory, so the process does not
shrink and nothing is measured about speed; the counts do not depend on that and are the same in every run. Losses,
gradient norms and final weights must equal those of the plain run bit for bit; in bfloat16 or compiled up to rounding.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from _common import ROOT, finish  # noqa: F401 - finds what tests share
from ranks import free_port, run_ranks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.algorithms.objective import PolicyObjective
from verl.algorithms.settings import AlgorithmSettings
from verl.data.flat_batch import FlatBatch
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import Schedule

RANKS, MIB = 2, 1 << 20
SETTINGS = {
    "plain": {},
    "no_reshard": {"reshard_after_forward": False},
    "checkpointing": {"gradient_checkpointing": True},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "param_offload": {"param_offload": True},
    "optimizer_offload": {"optimizer_offload": True},
    "both_offloads": {"param_offload": True, "optimizer_offload": True},
    "offload_policy": {"offload_policy": True},
    "all": {"gradient_checkpointing": True, "compute_dtype": "bfloat16", "offload_policy": True},
    "compiled": {"compile": True},
    "compiled_layers": {"compile_layers": True, "gradient_checkpointing": True},
    "no_compiler": {"compile": True, "compile_layers": True},
}
COMPILED = ("compiled", "compiled_layers")
NOTES = {"no_compiler": 2}
"""How many notes a run has: one for the kernels and one for the layers that cannot be compiled."""
ROUNDED = {"bfloat16": 2e-2, "all": 2e-2, "compiled": 1e-5, "compiled_layers": 1e-5}
"""By how much losses and norms may differ, as a share; all others not at all."""
SIZES = {
    False: {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 4096},
    True: {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "vocab_size": 2048},
}
TOKENS = {False: (4, 128), True: (4, 64)}  # sequences, tokens of each


class MemoryTracker(TorchDispatchMode):
    """Bytes of live tensors: on the device now, at the peak, and in host memory."""

    def __init__(self):
        super().__init__()
        self._alive, self.engine, self.peak = {}, None, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        new = [self.see(tensor) for tensor in tree_leaves(results) if isinstance(tensor, torch.Tensor)]
        if any(new):
            self.peak = max(self.peak, self.count()[0])
        return results

    def see(self, tensor):
        """Return whether the tensor has a new storage."""
        storage = local(tensor).untyped_storage()
        known, size = self._alive.get(storage._cdata), storage.nbytes()
        if known is not None and not known[0].expired() and known[1] == size:
            return False
        self._alive[storage._cdata] = StorageWeakRef(storage), size
        return True

    def count(self):
        self._alive = {key: (weak, size) for key, (weak, size) in self._alive.items() if not weak.expired()}
        alive = {key: torch.UntypedStorage._new_with_weak_ptr(weak.cdata) for key, (weak, _) in self._alive.items()}
        sizes = {key: storage.nbytes() for key, storage in alive.items() if storage is not None}
        host = self._in_host_memory()
        return sum(size for key, size in sizes.items() if key not in host), sum(sizes[key] for key in host & set(sizes))

    def _in_host_memory(self):
        """Yield what the settings put there: offloaded copies; shards, gradients and moments of FSDP."""
        engine = self.engine
        if engine is None:
            return set()
        tensors = [host for offloader in (engine._weights, engine._moments) for host in offloader._host.values()]
        if engine.settings.offload_policy:
            weights = [*engine.model.parameters()]
            tensors += [*weights, *(each.grad for each in weights if each.grad is not None)]
            tensors += [each for state in engine.optimizer.state.values() for each in state.values()]
        return {local(tensor).untyped_storage()._cdata for tensor in tensors}


def local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def batch_of(rank, sequences, length, vocabulary):
    generator = torch.Generator().manual_seed(rank)
    total, offsets = sequences * length, torch.arange(sequences + 1) * length
    mask = torch.rand(total, generator=generator) < 0.7
    mask[offsets[:-1]] = False
    tokens = torch.randint(vocabulary, (total,), generator=generator)
    advantages = torch.randn(total, generator=generator)
    return FlatBatch(tokens, offsets, mask, None, torch.full((total,), -7.0), None, advantages)


def measure(name, model, short, updates):
    """Return bytes between steps, at the peak of a forward pass and of an update, in host memory; and the results."""
    tracker = MemoryTracker()
    engine = FsdpEngine(FsdpSettings(str(model), schedule=Schedule(1e-3), **SETTINGS[name]))
    vocabulary = engine.model.hf.config.vocab_size
    batches = batch_of(engine.rank, *TOKENS[short], vocabulary).split([[0, 1], [2, 3]])
    for tensor in [*engine.model.parameters(), *engine.model.buffers(), *engine._weights._host.values()]:
        tracker.see(tensor)
    tracker.engine = engine
    seen = {}
    with tracker:
        losses = [
            engine.update(batches, PolicyObjective(AlgorithmSettings(entropy_coeff=0.01))) for _ in range(updates)
        ]
        seen["update"], tracker.peak = tracker.peak, 0
        engine.forward(batches)
        seen["forward"] = tracker.peak
    seen["idle"], seen["host"] = tracker.count()
    weights = [tensor.double().sum() for _, tensor in engine.weights()]
    return {"bytes": seen, "losses": losses, "weights": torch.stack(weights), "notes": engine.notes}


def rank_main(rank, port, folder, names, short, updates):
    torch.set_num_threads(1)
    init_process_group(rank, RANKS, "127.0.0.1", port)
    results = {name: measure(name, folder / "model", short, updates) for name in names}
    torch.save(results, folder / f"{names[0]}-{rank}.pt")
    dist.destroy_process_group()


def run(folder, names, short, updates):
    run_ranks(rank_main, RANKS, free_port(), folder, names, short, updates, deadline_s=1200)
    return torch.load(folder / f"{names[0]}-0.pt", weights_only=False)


def gap(one, other):
    """Return the largest relative difference of losses and norms."""
    pairs = [(ours[key], reference[key]) for ours, reference in zip(one, other, strict=True) for key in reference]
    return max(abs(a - b) / max(abs(b), 1e-2) for a, b in pairs)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="a smaller model, no real compiler")
    short = parser.parse_args().short
    names = [name for name in SETTINGS if name not in (*COMPILED, "no_compiler")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        config = Qwen2Config(**SIZES[short], num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False)
        model = Qwen2ForCausalLM(config)
        model.save_pretrained(folder / "model")
        shard = 4 * sum(parameter.numel() for parameter in model.parameters()) / RANKS
        results = run(folder, names, short, updates=2 if short else 3)
        print("trained with", ", ".join(results), flush=True)
        if not short:
            results |= run(folder, COMPILED, short, updates=3)
        # Failures of Triton and of inductor look alike here: a missing compiler.
        os.environ |= {"CXX": "/no/such/compiler", "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
        results |= run(folder, ["no_compiler"], short, updates=2 if short else 3)
    plain, problems = results["plain"], []
    print(
        f"{'setting':18} {'update':>8} {'forward':>8} {'between':>8} {'host':>8}  MiB on a rank; difference of losses"
    )
    for name, each in results.items():
        mib = {key: each["bytes"][key] / MIB for key in ("update", "forward", "idle", "host")}
        difference = gap(each["losses"], plain["losses"])
        equal = torch.equal(each["weights"], plain["weights"]) and difference == 0
        if not (equal if name not in ROUNDED else difference <= ROUNDED[name]):
            problems.append(f"{name}: losses differ by {difference:.2g}")
        print(f"{name:18} " + " ".join(f"{value:8.1f}" for value in mib.values()) + f"  {difference:.2g}")
    used = {name: each["bytes"] for name, each in results.items()}
    problems += [f"{what}: not saved" for what, good in savings(used, shard) if not good]
    for name, each in results.items():
        if len(each["notes"]) != NOTES.get(name, 0):
            problems.append(f"{name}: a compiler that fails is to be said once, and it alone: {each['notes']}")
    print(*problems, sep="\n")
    figures = {
        "shard_mib": round(shard / MIB, 1),
        "peak_mib": {name: round(each["update"] / MIB, 1) for name, each in used.items()},
        "between_steps_mib": {name: round(each["idle"] / MIB, 1) for name, each in used.items()},
        "host_mib": {name: round(each["host"] / MIB, 1) for name, each in used.items()},
        "equal_to_the_bit": [name for name in results if name not in ROUNDED],
        "largest_rounded": max(
            [gap(results[name]["losses"], plain["losses"]) for name in ROUNDED if name in results] + [0]
        ),
        "wrong": len(problems),
    }
    finish("offload", not problems, **figures)


def savings(used, shard):
    """Yield (expected saving, whether it holds), as in docs/out_of_memory.md: moments are two shards of weights."""
    plain = used["plain"]
    for name, update, idle in (
        ("param_offload", 0, shard),
        ("optimizer_offload", 0, 2 * shard),
        ("both_offloads", 0, 3 * shard),
        ("offload_policy", 3 * shard, 3 * shard),
    ):
        if name in used:
            yield f"{name}, between steps", plain["idle"] - used[name]["idle"] >= 0.98 * idle
            yield f"{name}, in an update", plain["update"] - used[name]["update"] >= 0.98 * update
    for name in ("checkpointing", "bfloat16"):
        if name in used:
            yield f"{name}, in an update", used[name]["update"] < plain["update"]
    if "no_reshard" in used:
        yield "reshard_after_forward, in an update", used["no_reshard"]["update"] > plain["update"]


if __name__ == "__main__":
    main()
