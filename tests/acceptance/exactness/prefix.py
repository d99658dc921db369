"""Check that responses which share their prompt give the same losses and gradients, and what that saves.

make show-prefix [ARGS=--short]

First, every term and mode of `show-gradient` on sequences that share prompts, some with replayed experts: the losses
and the gradient of engines that compute a prompt once per micro-batch, over random splits on one and two ranks, against
those of engines that compute whole sequences, unsplit on one rank.

Then the time of log-probs and of an update of 8 responses to a prompt, with and without sharing: medians of CPU time,
measured alternately. The time may be at most `SLACK` times what the tokens say, where at least half of the tokens are
saved, and at most `MOST` of that without sharing elsewhere. The short form prints times without checking them.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _common import finish
from gradient import (
    LIMIT,
    SEQUENCES,
    Engines,
    distance,
    micro_batches,
    objectives,
    random_cut,
    random_mini_batch,
    save_models,
)
from ranks import free_port, run_ranks
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from verl.algorithms.objective import sft
from verl.data.flat_batch import FlatBatch
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group

PROMPTS = (46, 1, 7, 21)  # tokens of the shared prompts; the other sequences have their own
SLACK, MOST = 1.5, 1.05
WIDTHS = {46: 512, 512: 512, 4096: 256}  # hidden size of the measured model, by tokens of the prompt


def grouped_sequences(generator):
    """Return long-tailed responses with tool output in between, in groups that share prompts, and some without one."""
    prompts = [torch.randint(64, (length,), generator=generator) for length in PROMPTS]
    tokens, masks = [], []
    for index in range(SEQUENCES):
        group = index % (len(prompts) + 1)
        prompt = prompts[group] if group < len(prompts) else torch.randint(64, (5,), generator=generator)
        length = int(2 + 40 * torch.rand(1, generator=generator) ** 3)
        tokens += [prompt, torch.randint(64, (length,), generator=generator)]
        mask = torch.rand(length, generator=generator) < (0.0 if index == 5 else 0.8)
        masks += [torch.zeros(len(prompt), dtype=torch.bool), mask]
    lengths = [len(prompt) + len(rest) for prompt, rest in zip(tokens[::2], tokens[1::2], strict=True)]
    return FlatBatch(torch.cat(tokens), torch.tensor([0, *lengths]).cumsum(0), torch.cat(masks))


class TokenCounter:
    """Counts the tokens that the layers of an engine compute."""

    def __init__(self, engine):
        self.tokens = 0
        engine.model.backbone.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module, args, output):
        self.tokens += args[0].numel()


def gap(metrics, reference):
    """Return the largest difference of two sets of metrics, relative where they are above 1."""
    assert metrics.keys() == reference.keys()
    return max(abs(metrics[name] - value) / max(1.0, abs(value)) for name, value in reference.items())


def compare(engines, mini_batch, references, cuts, stride, first_seed):
    """Return the largest differences of losses and gradients over random splits, and how many were compared."""
    losses, gradients = [], []
    for seed in range(first_seed, first_seed + cuts):
        pieces = random_cut(mini_batch.batch.lengths.tolist(), dist.get_world_size(), seed)[dist.get_rank()]
        for index, (key, (term, objective)) in enumerate(objectives().items()):
            if index % stride == seed % stride:
                parts = micro_batches(engines.of(term), mini_batch, pieces, term)
                gradients.append(distance(engines.gradient(term, parts, objective), references[key][0]))
                losses.append(gap(engines.metrics, references[key][1]))
    return {"loss": max(losses), "gradient": max(gradients), "compared": len(gradients)}


def compare_unsplit(plain, sharing, mini_batch):
    """Return the losses and gradients of whole sequences, and the largest differences of engines that share prompts."""
    references, losses, gradients = {}, [], []
    counters = [TokenCounter(engines.actor) for engines in (plain, sharing)]
    for key, (term, objective) in objectives().items():
        for engines in (plain, sharing):
            parts = micro_batches(engines.of(term), mini_batch, [range(SEQUENCES)], term)
            gradient = engines.gradient(term, parts, objective)
            expected, metrics = references.setdefault(key, (gradient, engines.metrics))
        gradients.append(distance(gradient, expected))
        losses.append(gap(engines.metrics, metrics))
    tokens, computed = (counter.tokens for counter in counters)
    worst = {"loss": max(losses), "gradient": max(gradients), "compared": len(gradients)}
    return references, worst | {"tokens": tokens, "computed": computed}


def rank_main(rank, world, port, directory, cuts, stride):
    torch.set_num_threads(1)
    init_process_group(rank, world, "127.0.0.1", port)
    sharing, results = Engines(directory, shared_prompts=True), {}
    if world == 1:
        plain = Engines(directory)
        mini_batch = random_mini_batch(plain, grouped_sequences)
        references, results["unsplit"] = compare_unsplit(plain, sharing, mini_batch)
        torch.save((mini_batch, references), directory / "reference.pt")
    mini_batch, references = torch.load(directory / "reference.pt", weights_only=False)
    results["split"] = compare(sharing, mini_batch, references, cuts, stride, first_seed=world * 10_000)
    if rank == 0:
        (directory / f"results-{world}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def compare_splits(cuts, stride):
    """Return the results unsplit, and split on 1 and on 2 ranks."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_models(directory)
        rank_main(0, 1, free_port(), directory, cuts, stride)
        run_ranks(rank_main, 2, 2, free_port(), directory, cuts, stride, deadline_s=1800)
        one, two = (json.loads((directory / f"results-{world}.json").read_text()) for world in (1, 2))
    return one["unsplit"], one["split"], two["split"]


def groups_of_responses(prompt, lengths):
    """Return responses of these lengths to each of some prompts, and their tokens with shared prompts: about 2,048,
    so that fixed costs of a pass are small, or one group of more."""
    generator = torch.Generator().manual_seed(0)
    groups = max(1, 2048 // (prompt + sum(lengths)))
    tokens = []
    for _ in range(groups):
        shared = torch.randint(256, (prompt,), generator=generator)
        tokens += [torch.cat([shared, torch.randint(256, (n,), generator=generator)]) for n in lengths]
    mask = torch.cat([torch.arange(len(sequence)) >= prompt for sequence in tokens])
    offsets = torch.tensor([0, *map(len, tokens)]).cumsum(0)
    return FlatBatch(torch.cat(tokens), offsets, mask), groups * (prompt + sum(lengths))


def measure(engines, batch, rounds):
    """Return tokens, and seconds of log-probs and of an update, each without and with sharing."""
    stages = {"logprobs": lambda engine: engine.forward([batch]), "update": lambda engine: engine.update([batch], sft)}
    counters, seconds = [TokenCounter(engine) for engine in engines], {stage: [[], []] for stage in stages}
    for _ in range(rounds):
        for which, engine in enumerate(engines):
            for stage, run in stages.items():
                start = time.process_time()
                run(engine)
                seconds[stage][which].append(time.process_time() - start)
    tokens = [counter.tokens // (len(stages) * rounds) for counter in counters]
    return tokens, {stage: [statistics.median(each) for each in both] for stage, both in seconds.items()}


def make_engines(width, directory):
    """Return engines of a model with one layer, without and with sharing."""
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=1,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        max_position_embeddings=8192,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    engines = [FsdpEngine(FsdpSettings(directory, shared_prompts=on)) for on in (False, True)]
    measure(engines, groups_of_responses(46, [18])[0], rounds=1)  # a warm-up
    return engines


def measure_time(prompts, lengths, rounds):
    """Return one row of figures per prompt and lengths of responses."""
    rows = []
    init_process_group(0, 1, "127.0.0.1", free_port())
    for prompt in prompts:
        with tempfile.TemporaryDirectory() as directory:
            engines = make_engines(WIDTHS[prompt], directory)
        for name, of_responses in lengths.items():
            batch, expected = groups_of_responses(prompt, of_responses)
            tokens, seconds = measure(engines, batch, rounds)
            row = {"prompt": prompt, "responses": name, "tokens": tokens, "ratio": round(tokens[1] / tokens[0], 3)}
            row["is_shared"] = tokens == [batch.num_tokens, expected]
            for stage, (plain, sharing) in seconds.items():
                row[stage] = round(sharing / plain, 3)
                row[f"{stage}_ms"] = [round(1000 * plain), round(1000 * sharing)]
            print(json.dumps(row), flush=True)
            rows.append(row)
    dist.destroy_process_group()
    return rows


def is_fast(row):
    allowed = SLACK * row["ratio"] if row["ratio"] <= 0.5 else MOST
    return max(row["logprobs"], row["update"]) <= allowed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="fewer splits and sizes; times are not checked")
    short = parser.parse_args().short
    disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    start = time.monotonic()
    lengths = {"18": [18] * 8, "18 to 512": [18 + 494 * k // 7 for k in range(8)], "512": [512] * 8}
    if short:
        rows = measure_time((46,), {"18": lengths["18"]}, rounds=1)
    else:
        rows = measure_time((46, 512, 4096), lengths, rounds=3)
    results = compare_splits(*((4, 19) if short else (100, 8)))
    worst_loss, worst_gradient = (max(result[name] for result in results) for name in ("loss", "gradient"))
    tokens, computed = results[0]["tokens"], results[0]["computed"]
    figures = {
        "terms_and_modes": len(objectives()),
        "compared": sum(result["compared"] for result in results),
        "worst_loss": worst_loss,
        "worst_gradient": worst_gradient,
        "limit": LIMIT,
        "computed_of_tokens": round(computed / tokens, 3),
        "prompt_responses_tokens_logprobs_update": [
            [row[name] for name in ("prompt", "responses", "ratio", "logprobs", "update")] for row in rows
        ],
        "seconds": round(time.monotonic() - start, 1),
    }
    is_shared = computed < 0.8 * tokens and all(row["is_shared"] for row in rows)
    is_exact = max(worst_loss, worst_gradient) <= LIMIT
    finish("prefix", is_exact and is_shared and (short or all(map(is_fast, rows))), **figures)


if __name__ == "__main__":
    main()
