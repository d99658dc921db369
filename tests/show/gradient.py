"""The gradient does not depend on how the work is cut: many random cuts of one mini-batch, every term, every mode.

python tests/show/gradient.py [--short]

A cut is an order, micro-batches of a size or under a token budget, and one or two FSDP2 ranks. Its gradient is compared
with that of the whole mini-batch in one piece on one rank: ||g - g0|| / ||g0||, over all parameters. Every cut is tried
with every term; the aggregation modes take turns. Then the packed gradient is compared with that of transformers' own
padded batches. All in float32.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _common import finish
from ranks import free_port, run_ranks
from tiny import tiny_qwen2
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from verl.algorithms.aggregate import MODES, totals_of
from verl.algorithms.objective import PolicyObjective
from verl.data.batch import FlatBatch
from verl.data.packing import balance, chunk, pack
from verl.training.engine import ModelOutput
from verl.training.fsdp import FsdpEngine, FsdpSettings
from verl.training.group import init_process_group

LIMIT = 1e-5
LENGTH = 40.0
SEQUENCES = 24
TERMS = {
    "policy": PolicyObjective(),
    "entropy": PolicyObjective(entropy_coeff=1.0),
    "kl": PolicyObjective(kl_coef=1.0, kl_type="k3"),
}


class Recorder(FsdpEngine):
    """The real engine, but where it would step it keeps the gradient."""

    def _step(self, lr, *, worth):
        pieces = [parameter.grad.full_tensor().flatten() for parameter in self.model.parameters()]
        self.gradient = torch.cat(pieces).clone()
        self.optimizer.zero_grad(set_to_none=True)
        return float(self.gradient.norm()), False


def objectives():
    """(term, mode) -> loss. Entropy and KL alone: with advantages of zero the policy term has no gradient."""
    for term, objective in TERMS.items():
        for mode in MODES:
            options = {slot: getattr(objective, slot) for slot in objective.__slots__}
            yield term, mode, PolicyObjective(**{**options, "agg_mode": mode, "scale": LENGTH})


def prepared(batch, term):
    return batch if term == "policy" else batch.with_(advantages=torch.zeros_like(batch.advantages))


def mini_batch(engine):
    """Long-tailed sequences, one of them without a generated token; old and reference policies a little away."""
    generator = torch.Generator().manual_seed(3)
    lengths = (4 + 60 * torch.rand(SEQUENCES, generator=generator).pow(3)).long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) < 0.7
    mask[offsets[:-1]] = False
    mask[offsets[5] : offsets[6]] = False
    batch = FlatBatch(torch.randint(64, (total,), generator=generator), offsets, mask)
    (output,) = engine.forward([batch])
    noise = [torch.randn(total, generator=generator) for _ in range(2)]
    per_sequence = torch.randn(SEQUENCES, generator=generator)
    return batch.with_(
        old_logprobs=output.logprobs + 0.2 * noise[0],
        ref_logprobs=output.logprobs + 0.2 * noise[1],
        advantages=per_sequence[batch.segment_ids],
    )


def random_cut(lengths, world, seed):
    """For each rank, its micro-batches as lists of sequences; equally many on every rank, some empty."""
    draw = random.Random(seed)
    order = draw.sample(range(len(lengths)), len(lengths))
    if world == 1:
        shares = [order]
    elif draw.random() < 0.5:
        shares = [[order[i] for i in part] for part in balance([lengths[i] for i in order], world)]
    else:
        edge = draw.randrange(len(order) + 1)
        shares = [order[:edge], order[edge:]]
    budget, size = draw.randint(max(lengths), sum(lengths)), draw.randint(1, len(lengths))
    by_tokens, shuffled = draw.random() < 0.5, draw.random() < 0.5
    cut = []
    for share in shares:
        mine = [lengths[i] for i in share]
        pieces = [[share[i] for i in piece] for piece in (pack(mine, budget) if by_tokens else chunk(mine, size))]
        for piece in pieces if shuffled else ():
            draw.shuffle(piece)
        cut.append(pieces)
    most = max(len(pieces) for pieces in cut)
    for pieces in cut:
        pieces += [[]] * (most - len(pieces))
        draw.shuffle(pieces)
    return cut


def distance(gradient, reference):
    return float((gradient - reference).norm() / reference.norm())


def worst_of(engine, batch, references, cuts, first_seed):
    worst = {}
    for seed in range(first_seed, first_seed + cuts):
        pieces = random_cut(batch.lengths.tolist(), engine.world_size, seed)[engine.rank]
        for term, mode, objective in objectives():
            if mode != MODES[seed % len(MODES)]:
                continue
            engine.update(prepared(batch, term).split(pieces), objective)
            key = f"{term}/{mode}"
            worst[key] = max(worst.get(key, 0.0), distance(engine.gradient, references[key]))
    return worst


def padded_gradients(path, batch, size):
    """The same losses on transformers' own batches of `size`, padded at the right, with plain log-softmax."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    totals = totals_of(batch.mask, batch.offsets)
    gradients = {}
    for term, mode, objective in objectives():
        model.zero_grad()
        for start in range(0, len(batch), size):
            part = prepared(batch, term).select(range(start, min(start + size, len(batch))))
            rows = torch.nn.utils.rnn.pad_sequence(part.tokens.split(part.lengths.tolist()), batch_first=True)
            real = torch.arange(rows.shape[1]) < part.lengths[:, None]
            log_p = model(input_ids=rows, attention_mask=real.long()).logits.log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            chosen = log_p[:, :-1].gather(-1, rows[:, 1:, None]).squeeze(-1)
            shifted = [torch.nn.functional.pad(values, (1, 0))[real] for values in (chosen, entropy[:, :-1])]
            objective(ModelOutput(*shifted), part, totals)[0].backward()
        pieces = [parameter.grad.flatten() for parameter in model.parameters()]
        gradients[f"{term}/{mode}"] = torch.cat(pieces)
    return gradients


def rank_main(rank, world, port, directory, cuts):
    torch.set_num_threads(1)
    init_process_group(rank, world, "127.0.0.1", port)
    engine = Recorder(FsdpSettings(str(directory / "model")))
    if world == 1:
        batch, references = mini_batch(engine), {}
        for term, mode, objective in objectives():
            engine.update([prepared(batch, term)], objective)
            references[f"{term}/{mode}"] = engine.gradient
        torch.save((batch, references), directory / "reference.pt")
    batch, references = torch.load(directory / "reference.pt", weights_only=False)
    worst = worst_of(engine, batch, references, cuts, first_seed=world * 10_000)
    if rank == 0:
        (directory / f"worst-{world}.json").write_text(json.dumps(worst))
    dist.destroy_process_group()


def run(world, directory, cuts):
    if world == 1:
        rank_main(0, 1, free_port(), directory, cuts)
    else:
        run_ranks(rank_main, world, world, free_port(), directory, cuts, deadline_s=1800)
    return json.loads((directory / f"worst-{world}.json").read_text())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="a tenth of the cuts")
    cuts = 12 if parser.parse_args().short else 100
    disable_progress_bar()
    torch.manual_seed(0)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True)).save_pretrained(directory / "model")
        one, two = run(1, directory, cuts), run(2, directory, cuts)
        batch, references = torch.load(directory / "reference.pt", weights_only=False)
        padded = dict.fromkeys(references, 0.0)
        for size in (1, 5, SEQUENCES):
            for key, gradient in padded_gradients(directory / "model", batch, size).items():
                padded[key] = max(padded[key], distance(gradient, references[key]))
    for key in references:
        print(f"{key:32} 1 rank {one[key]:.1e}   2 ranks {two[key]:.1e}   padded {padded[key]:.1e}")
    figures = {
        "cuts": 2 * cuts,
        "gradients_compared": 2 * cuts * len(TERMS),
        "worst_1_rank": max(one.values()),
        "worst_2_ranks": max(two.values()),
        "worst_padded": max(padded.values()),
        "limit": LIMIT,
        "dtype": "float32",
        "seconds": round(time.monotonic() - start, 1),
    }
    good = max(figures["worst_1_rank"], figures["worst_2_ranks"], figures["worst_padded"]) <= LIMIT
    finish("gradient", good, **figures)


if __name__ == "__main__":
    main()
