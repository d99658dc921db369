"""Load a model on 4 ranks, each reading only its slices, with the weights that loading it whole gives, to the bit.

make show-load [ARGS=--short]

1. Memory: a checkpoint of several safetensors files is loaded by 4 gloo ranks. Resident memory may grow by a rank's
   shard and 1.5 times the largest layer, at any moment while weights are read, and at the end. In between, the packing
   check runs on the sharded model: it must need no more than any later forward pass. Loading the model whole, as a
   control, has to exceed the bound.
2. Weights: shards of policies, critics, adapters and mixtures of experts equal those of a model loaded whole.
3. Size: the index of a 72B model is resolved to the slices of 64 ranks; its files are empty, so nothing can be read.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import finish
from ranks import free_port, run_ranks
from tiny import FAMILIES, save_family, tiny_qwen2
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification
from transformers.utils.logging import disable_progress_bar

from verl.data.flat_batch import FlatBatch
from verl.models.model_folder import WEIGHTS_INDEX
from verl.training.fsdp import model_loader
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group
from verl.training.settings import LoraSettings
from verl.training.sharded_loading import SlicingError, cut_rows, find_files, find_sources

RANKS, MIB = 4, 2**20
LARGE_RANKS = 64
LARGE = Qwen2Config(
    vocab_size=152064,
    hidden_size=8192,
    intermediate_size=29568,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    tie_word_embeddings=False,
    architectures=["Qwen2ForCausalLM"],
    dtype="bfloat16",
)
LARGE_PARAMETERS = 72_706_203_648
FILE_BYTES = 4_000_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="3 smaller layers instead of 6")
    short = parser.parse_args().short
    disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="verl-load-") as directory:
        root = Path(directory)
        resolved = resolve_large(root)
        print(f"72B: {resolved}", flush=True)
        engines = save_models(root, short=short)
        run_ranks(load_on, RANKS, free_port(), root, engines, deadline_s=1200)
        ranks = [torch.load(root / f"rank-{rank}.pt", weights_only=True) for rank in range(RANKS)]
    for rank, figures in enumerate(ranks):
        print(f"rank {rank}: {figures}", flush=True)
    different = sorted({name for figures in ranks for name, count in figures["different"].items() if count})
    is_bounded = all(max(each["reading"], each["after"]) <= each["bound"] for each in ranks)
    finish(
        "load",
        is_bounded
        and not different
        and all(each["whole"] > each["bound"] for each in ranks)
        and all(each["check"] <= 1.1 * each["forward"] for each in ranks)
        and resolved["exact"],
        ranks=RANKS,
        **{f"{name}_mib": max(each[name] for each in ranks) for name in ("reading", "after", "check", "forward")},
        **{f"{name}_mib": min(each[name] for each in ranks) for name in ("bound", "shard", "largest_layer", "whole")},
        tensors_compared=sum(each["tensors"] for each in ranks),
        models_compared=1 + len(engines),
        models_different=different,
        large=resolved,
    )


def save_models(root: Path, *, short: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """Save models; return the engines to compare: name -> (folder, settings)."""
    torch.manual_seed(0)
    layers, hidden, inner = (3, 768, 2304) if short else (6, 1024, 2816)
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    large = tiny_qwen2(vocab_size=4099, num_attention_heads=8, num_key_value_heads=2, dtype="bfloat16", **sizes)
    model = AutoModelForCausalLM.from_config(large, dtype=torch.bfloat16)
    model.save_pretrained(root / "large", max_shard_size="40MB")
    Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True, vocab_size=67)).save_pretrained(root / "tied")
    Qwen2ForTokenClassification(tiny_qwen2(num_labels=1)).save_pretrained(root / "critic")
    engines: dict[str, tuple[str, dict[str, Any]]] = {
        "adapter": ("tied", {"lora": LoraSettings(4)}),
        "critic": ("critic", {"head": "value"}),
        "new critic": ("tied", {"head": "value"}),
    }
    for family in FAMILIES:
        save_family(family, root / family)
        engines[family] = family, {}
    return engines


def load_on(rank: int, port: int, root: Path, engines: dict[str, tuple[str, dict[str, Any]]]) -> None:
    ctypes.CDLL(None).mallopt(-3, MIB)  # M_MMAP_THRESHOLD: freed tensors leave resident memory at once
    torch.set_num_threads(1)
    disable_progress_bar()
    init_process_group(rank, RANKS, "127.0.0.1", port)
    make_engine(root / "tied")  # imports and first collectives are not counted
    figures = measure(root / "large")
    for name, (folder, settings) in engines.items():
        different, tensors = compare(make_engine(root / folder, **settings), load_whole(root / folder, **settings))
        figures["different"][name] = different
        figures["tensors"] += tensors
    torch.save(figures, root / f"rank-{rank}.pt")
    dist.destroy_process_group()


def make_engine(path: Path, **settings: Any) -> FsdpEngine:
    return FsdpEngine(FsdpSettings(str(path), **settings))


def load_whole(path: Path, **settings: Any) -> FsdpEngine:
    """Load as before there were slices: every rank has the whole model for a moment."""

    def refuse(*_: Any, **__: Any) -> None:
        raise SlicingError("this is the control")

    return replaced("_open_in_slices", refuse, lambda: make_engine(path, **settings))


def replaced(name: str, function: Any, action: Callable[[], FsdpEngine]) -> FsdpEngine:
    real = getattr(model_loader, name)
    setattr(model_loader, name, function)
    try:
        return action()
    finally:
        setattr(model_loader, name, real)


def measure(path: Path) -> dict[str, Any]:
    """Return by how many MiB resident memory grows, and whether the weights are those of a whole model."""
    read: list[int] = []
    check = model_loader._enable_packing

    def watch(*args: Any) -> None:
        read.append(peak_memory())
        reset_peak()
        check(*args)

    start = reset_peak()
    engine = replaced("_enable_packing", watch, lambda: make_engine(path))
    checked, after = peak_memory(), reset_peak()
    mask = torch.arange(15) > 0
    engine.forward([FlatBatch(torch.arange(15), torch.tensor([0, 15]), mask)])
    forward = peak_memory()
    layers = [*engine.model.layers(), nn.ModuleList([engine.model.hf.lm_head, engine.model.backbone.embed_tokens])]
    largest = max(sum(parameter.numel() * 4 for parameter in layer.parameters()) for layer in layers)
    shard = sum(parameter.to_local().nbytes for parameter in engine.model.parameters())
    before = reset_peak()
    whole = replaced("_enable_packing", lambda *_: read.append(peak_memory()), lambda: load_whole(path))
    different, tensors = compare(engine, whole)
    sizes = {
        "reading": read[0] - start,
        "after": after - start,
        "check": checked - start,
        "forward": forward - start,
        "shard": shard,
        "largest_layer": largest,
        "bound": shard + 1.5 * largest,
        "whole": read[1] - before,
    }
    figures: dict[str, Any] = {name: round(size / MIB, 1) for name, size in sizes.items()}
    return figures | {"different": {"large": different}, "tensors": tensors}


def compare(engine: FsdpEngine, whole: FsdpEngine) -> tuple[int, int]:
    """Return how many shards and buffers of two engines differ in some bit, and how many were compared."""
    pairs = []
    for kind in ("named_parameters", "named_buffers"):
        own, other = (dict(getattr(each.model, kind)()) for each in (engine, whole))
        assert own.keys() == other.keys()
        pairs += [(own[name], other[name]) for name in own]
    local = [[each.to_local() if hasattr(each, "to_local") else each for each in pair] for pair in pairs]
    return sum(a.dtype != b.dtype or not torch.equal(a, b) for a, b in local), len(pairs)


def reset_peak() -> int:
    """Return the resident memory, and start a new peak from it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return read_status("VmRSS")


def peak_memory() -> int:
    return read_status("VmHWM")


def read_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def resolve_large(root: Path) -> dict[str, Any]:
    """Resolve the index of a 72B model, whose files are empty, to the slices of every rank."""
    folder = root / "72B"
    LARGE.save_pretrained(folder)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(LARGE)
    files, size = {}, 0
    for name, parameter in hf.named_parameters():
        files[name] = f"model-{1 + size // FILE_BYTES:05d}-of-00037.safetensors"
        size += 2 * parameter.numel()
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": files}))
    for file in set(files.values()):
        (folder / file).touch()
    before, start = reset_peak(), time.monotonic()
    sources = find_sources(hf, find_files(str(folder)))
    elements, exact = [0] * LARGE_RANKS, True
    for name, parameter in hf.named_parameters():
        rows, shape = -(-parameter.shape[0] // LARGE_RANKS), tuple(parameter.shape)
        for rank in range(LARGE_RANKS):
            begin, end = (min(each * rows, shape[0]) for each in (rank, rank + 1))
            parts = list(cut_rows(sources[name], shape, begin, end))
            exact &= [(part.index[0].start, part.index[0].stop) for part in parts] == [(begin, end)] * (begin < end)
            elements[rank] += sum(math.prod(part.shape) for part in parts)
    return {
        "parameters": sum(elements),
        "tensors": len(sources),
        "files": len(set(files.values())),
        "ranks": LARGE_RANKS,
        "largest_share_gb": round(2 * max(elements) / 1e9, 2),
        "grown_mib": round((peak_memory() - before) / MIB, 1),
        "seconds": round(time.monotonic() - start, 1),
        "exact": exact and sum(elements) == LARGE_PARAMETERS == sum(p.numel() for p in hf.parameters()),
    }


if __name__ == "__main__":
    main()
