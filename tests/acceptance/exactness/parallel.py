"""Check that losses and gradients do not depend on how a model and its sequences are spread over ranks.

make show-parallel [ARGS=--short]

Every layout runs on 4 gloo ranks, with random micro-batches, and is compared with the unsplit mini-batch on 1 rank: the
gradient by ||g - g0|| / ||g0|| over all parameters, and every metric of the loss. Terms and modes are those of
`gradient.py`: every policy loss, the entropy, every form of the KL, the value loss, and the routers of a mixture. All
in float32.

Then the peak memory of Qwen2.5-7B on 8 ranks with one sequence of 128k tokens is measured under fake tensors, and
must fall with the degree of sequence parallelism, as the closed form of `verl plan` says.
"""

import argparse
import json
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from _common import finish
from gradient import (
    LIMIT,
    SEQUENCES,
    TERMS,
    Engines,
    distance,
    micro_batches,
    objectives,
    random_mini_batch,
    save_models,
)
from memory_measure import measure
from public_models import MODELS
from ranks import free_port, run_ranks
from transformers.utils.logging import disable_progress_bar

from verl.data.packing import balance, chunk
from verl.memory_plan.model_memory import ModelMemory, PassSize
from verl.models.model_shape import ModelShape
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group

RANKS, LONG, PROMPT = 4, 131_072, 1_024
LAYOUTS = {
    "fsdp 4": {},
    "hsdp 2x2": {"fsdp_size": 2},
    "replicated 4": {"fsdp_size": 1},
    "ulysses 2": {"sequence_parallel_size": 2},
    "ulysses 4": {"sequence_parallel_size": 4},
    "hsdp 2x2, ulysses 2": {"fsdp_size": 2, "sequence_parallel_size": 2},
    "experts 2": {"expert_parallel_size": 2},
    "experts 4": {"expert_parallel_size": 4},
    "hsdp 2x2, experts 2": {"fsdp_size": 2, "expert_parallel_size": 2},
    "ulysses 2, experts 2": {"sequence_parallel_size": 2, "expert_parallel_size": 2},
    "shared prompts, ulysses 2": {"shared_prompts": True, "sequence_parallel_size": 2},
}


def random_cut(lengths, ranks, seed):
    """Return the micro-batches of each rank as lists of sequences; equally many on every rank, some empty."""
    draw = random.Random(seed)
    order = draw.sample(range(len(lengths)), len(lengths))
    shares = [[order[k] for k in part] for part in balance([lengths[k] for k in order], ranks)]
    if draw.random() < 0.5:  # uneven: one rank has nothing to do
        shares[0], shares[-1] = [*shares[0], *shares[-1]], [] if ranks > 1 else [*shares[0]]
    size = draw.randint(1, len(lengths))
    cut = [[[share[k] for k in part] for part in chunk([lengths[k] for k in share], size)] for share in shares]
    most = max(map(len, cut))
    return [parts + [[]] * (most - len(parts)) for parts in cut]


def reference_main(directory):
    """Compute the mini-batch, and its gradients and metrics on one rank."""
    init_process_group(0, 1, "127.0.0.1", free_port())
    engines = Engines(directory)
    mini_batch, expected = random_mini_batch(engines), {}
    for key, (term, objective) in objectives().items():
        batches = micro_batches(engines.of(term), mini_batch, [range(SEQUENCES)], term)
        expected[key] = engines.gradient(term, batches, objective), engines.metrics
    torch.save((mini_batch, expected), directory / "reference.pt")
    dist.destroy_process_group()


def rank_main(rank, port, directory, stride):
    torch.set_num_threads(1)
    init_process_group(rank, RANKS, "127.0.0.1", port)
    mini_batch, expected = torch.load(directory / "reference.pt", weights_only=False)
    results = {}
    for number, (layout, settings) in enumerate(LAYOUTS.items()):
        engines = Engines(directory, **settings)
        group = settings.get("sequence_parallel_size", 1)
        results[layout] = {}
        for index, (key, (term, objective)) in enumerate(objectives().items()):
            if index % stride == number % stride:
                cut = random_cut(mini_batch.batch.lengths.tolist(), RANKS // group, seed=1000 * number + index)
                batches = micro_batches(engines.of(term), mini_batch, cut[rank // group], term)
                gradient = engines.gradient(term, batches, objective)
                results[layout][key] = compare(gradient, engines.metrics, *expected[key])
        if rank == 0:
            gradients, losses = (max(pair[k] for pair in results[layout].values()) for k in range(2))
            print(f"{layout:24} {len(results[layout])} gradients: {gradients:.1e}, losses: {losses:.1e}", flush=True)
    if rank == 0:
        (directory / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def compare(gradient, metrics, expected, expected_metrics):
    """Return the distance of the gradients, and the largest difference of a metric."""
    assert metrics.keys() == expected_metrics.keys(), metrics.keys() ^ expected_metrics.keys()
    gaps = [abs(metrics[name] - value) / max(1.0, abs(value)) for name, value in expected_metrics.items()]
    return distance(gradient, expected), max(gaps)


def measure_memory(layers):
    """Return the peak of an update in GiB by the degree of sequence parallelism, and how far the estimate is off."""
    config, peaks, gaps = MODELS["Qwen2.5-7B"], {}, []
    config |= {"num_hidden_layers": layers or config["num_hidden_layers"]}
    for degree in (1, 2, 4):
        settings = FsdpSettings(
            "7B", compute_dtype="bfloat16", gradient_checkpointing=True, device="cuda", sequence_parallel_size=degree
        )
        peak = measure(config, settings, 8, [LONG], prompt=PROMPT, accumulates=False)["update"]
        size = PassSize(LONG // degree, (LONG - PROMPT) // degree)
        estimate = ModelMemory(ModelShape.from_config(config), settings, 8, size, size, 1).peaks()["update"].total
        peaks[degree] = round(peak / 2**30, 1)
        gaps.append(abs(estimate / peak - 1.0))
        print(f"one sequence of {LONG:,} tokens, ulysses {degree}: {peaks[degree]} GiB", flush=True)
    return peaks, max(gaps)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="each layout with some of the terms, and 2 layers of 7B")
    short = parser.parse_args().short
    disable_progress_bar()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_models(directory, num_attention_heads=4, num_key_value_heads=2)
        reference_main(directory)
        run_ranks(rank_main, RANKS, free_port(), directory, 6 if short else 1, deadline_s=1800)
        results = json.loads((directory / "results.json").read_text())
    peaks, gap = measure_memory(2 if short else None)
    gradients, losses = ([pair[k] for layout in results.values() for pair in layout.values()] for k in range(2))
    figures = {
        "layouts": list(LAYOUTS),
        "terms": len(TERMS),
        "gradients_compared": len(gradients),
        "worst_gradient": max(gradients),
        "worst_loss": max(losses),
        "limit": LIMIT,
        "update_gib_by_ulysses_size": peaks,
        "estimate_off_by": round(gap, 3),
        "seconds": round(time.monotonic() - start, 1),
    }
    falls = all(more < 0.8 * less for less, more in pairwise(peaks.values()))
    finish("parallel", max(*gradients, *losses) <= LIMIT and falls and gap <= 0.1, **figures)


if __name__ == "__main__":
    main()
