"""Check that gradients do not depend on how a mini-batch is split: many random splits, every term, every mode.

make show-gradient [ARGS=--short]

A split is an order, micro-batches of a size or under a token budget, and one or two FSDP2 ranks. Its gradient is
compared with that of the unsplit mini-batch on one rank: ||g - g0|| / ||g0||, over all parameters. Terms are every
policy loss, the entropy, every form of the KL, the exact KL to a teacher of another size, the value loss of a critic,
the loss of PRIME's process reward model, and for a mixture of experts the load balance of its routers and the policy
loss with replayed experts; terms and modes alternate over the splits. Losses that need a prepass run it over the ranks
of the split, by the code that trains. Then the packed gradient is compared with that of padded batches in transformers.
All in float32.
"""

import argparse
import json
import random
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from _common import finish
from ranks import free_port, run_ranks
from tiny import save_family, tiny_qwen2
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func
from transformers.utils.logging import disable_progress_bar

from verl.algorithms.advantages import AdvantageInputs
from verl.algorithms.aggregate import MODES, count_totals
from verl.algorithms.losses import LOSSES, PER_SEQUENCE, LossOptions
from verl.algorithms.objective import ModelOutput, OutcomeObjective, PolicyObjective, ValueObjective, ValueOutput
from verl.algorithms.prepass import PREPASSES
from verl.algorithms.settings import AlgorithmSettings, Distillation
from verl.data.flat_batch import FlatBatch
from verl.data.packing import balance, chunk, pack
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.fsdp.shared_prompts import find_shared_prompts
from verl.training.policy.passes import run_prepass
from verl.training.policy.teacher import TeacherEngine
from verl.training.process_group import init_process_group

LIMIT = 1e-5
LENGTH = 40.0
SEQUENCES = 24
OPTIONS = LossOptions(clip_cov_ratio=0.3, clip_cov_lb=-5.0, clip_cov_ub=5.0, kl_cov_ratio=0.1, ppo_kl_coef=1.0)
FORWARD = Distillation("loss", loss_mode="forward_kl_topk", topk=5)
TERMS = {
    **{name: PolicyObjective(AlgorithmSettings(loss_mode=name, loss_options=OPTIONS)) for name in LOSSES},
    "off-policy mask": PolicyObjective(
        AlgorithmSettings(loss_options=replace(OPTIONS, off_policy_mask_threshold=1e-4))
    ),
    "entropy": PolicyObjective(AlgorithmSettings(entropy_coeff=1.0)),
    **{
        f"kl {form}": PolicyObjective(AlgorithmSettings(loss_kl_coef=1.0, loss_kl_type=form))
        for kind in ("k1", "abs", "k2", "k3")
        for form in (kind, kind + "+")
    },
    "kl full": PolicyObjective(AlgorithmSettings(loss_kl_coef=1.0, loss_kl_type="full")),
    "distillation": PolicyObjective(AlgorithmSettings(distillation=Distillation("loss"))),
    "distillation forward": PolicyObjective(AlgorithmSettings(distillation=FORWARD)),
    "value": ValueObjective(AlgorithmSettings(value_clip=0.2)),
    "process": OutcomeObjective(beta=0.5),
    "router balance": PolicyObjective(AlgorithmSettings()),
    "router replay": PolicyObjective(AlgorithmSettings()),
}
MIXTURE = {"router balance": {"router_aux_loss_coef": 1.0}, "router replay": {"router_replay": True}}
EXPERTS, TOP = 4, 2  # of the mixture, in each of its 2 layers


class Recorder(FsdpEngine):
    """An engine that keeps the gradient instead of stepping."""

    def _step(self, lr, *, has_tokens):
        pieces = [parameter.grad.full_tensor().flatten() for parameter in self.model.parameters()]
        self.gradient = torch.cat(pieces).clone()
        self.optimizer.zero_grad(set_to_none=True)
        return float(self.gradient.double().norm()), False  # in float32 it would be off by up to 1.5e-5


class Engines:
    """An actor, a critic, a mixture of experts, and two frozen models: a reference that differs from the actor, and a
    wider teacher. `layout` are settings of all of them."""

    def __init__(self, directory, **layout):
        experts = layout.pop("expert_parallel_size", 1)

        def settings(name, **changes):
            return FsdpSettings(str(directory / name), **changes, **layout)

        self.actor = Recorder(settings("model"))
        self.critic = Recorder(settings("critic", head="value", role="critic"))
        self.reference, self.teacher = (
            FsdpEngine(settings(name, trainable=False)) for name in ("reference", "teacher")
        )
        self.teachers = {"distillation": self.teacher, "distillation forward": TeacherEngine(self.teacher, FORWARD)}
        self.mixture = {
            term: Recorder(settings("mixture", expert_parallel_size=experts, **routing))
            for term, routing in MIXTURE.items()
        }

    def of(self, term):
        return self.mixture.get(term, self.critic if term == "value" else self.actor)

    def gradient(self, term, micro_batches, objective):
        engine = self.of(term)
        self.metrics = engine.update(
            micro_batches,
            objective,
            reference=self.reference if term == "kl full" else None,
            teacher=self.teachers.get(term),
        )
        return engine.gradient


def objectives():
    """Return term/mode -> (term, loss). Terms whose formula is a mean over sequences have no other mode.

    For a mixture one mode is enough: the routers do not depend on it.
    """
    results = {}
    for term, objective in TERMS.items():
        if term in (*PER_SEQUENCE, "process", *MIXTURE):
            results[term] = term, objective
            continue
        for mode in MODES:
            algorithm = replace(objective.algorithm, agg_mode=mode, value_agg_mode=mode, scale=LENGTH)
            results[f"{term}/{mode}"] = term, replace(objective, algorithm=algorithm)
    return results


def prepared(mini_batch, term):
    """Return the batch for a term. Advantages are 0 where the policy term must not add a gradient."""
    batch = mini_batch.batch
    if term == "process":
        outcomes = mini_batch.scores.float()[batch.segment_ids]
        return batch.with_(advantages=outcomes, old_logprobs=batch.ref_logprobs)
    if term in MIXTURE:
        batch = batch.with_(old_logprobs=mini_batch.mixture_logprobs, routed_experts=mini_batch.experts[term])
    alone = term in ("entropy", "router balance") or term.startswith(("kl ", "distillation"))
    return batch.with_(advantages=torch.zeros_like(batch.advantages)) if alone else batch


def micro_batches(engine, mini_batch, pieces, term):
    """Return the micro-batches of this rank, after a prepass over all ranks if the loss needs one."""
    batch, prepass = prepared(mini_batch, term), PREPASSES.get(term)
    if prepass is None:
        return batch.split(pieces)
    inputs = AdvantageInputs(
        scores=mini_batch.scores,
        groups=mini_batch.groups,
        mask=batch.mask,
        offsets=batch.offsets,
        rewards=torch.zeros(batch.num_tokens).double(),
        episodes=torch.arange(SEQUENCES),
        rank=engine.data_rank,
        gather=engine.gather,
    )
    parts = [np.array(piece, dtype=np.int64) for piece in pieces]
    return run_prepass([prepass], engine, batch, inputs, parts, OPTIONS)[0]


def random_sequences(generator):
    """Return long-tailed sequences, one without generated tokens."""
    lengths = (4 + 60 * torch.rand(SEQUENCES, generator=generator).pow(3)).long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) < 0.7
    mask[offsets[:-1]] = False
    mask[offsets[5] : offsets[6]] = False
    return FlatBatch(torch.randint(64, (total,), generator=generator), offsets, mask)


def random_mini_batch(engines, make_sequences=random_sequences):
    """Return sequences with other policies and values that differ a little."""
    generator = torch.Generator().manual_seed(3)
    batch = make_sequences(generator)
    own, replayed = random_experts(engines, batch, generator)
    mixture = engines.mixture["router replay"].forward([batch.with_(routed_experts=replayed)])[0]
    mini_batch = with_other_policies(batch, engines.actor, engines.critic, generator)
    noise = torch.randn(batch.num_tokens, generator=generator)
    mini_batch.mixture_logprobs = mixture.logprobs + 0.2 * noise
    mini_batch.experts = dict(zip(MIXTURE, (own, replayed), strict=True))
    return mini_batch


def with_other_policies(batch, actor, critic, generator):
    """Return a mini-batch of these sequences, sampled by other policies than the actor."""
    (output,), (worth,) = actor.forward([batch]), critic.forward([batch])
    noise = [torch.randn(batch.num_tokens, generator=generator) for _ in range(5)]
    per_sequence = torch.randn(SEQUENCES, generator=generator)
    batch = batch.with_(
        old_logprobs=output.logprobs + 0.2 * noise[0],
        ref_logprobs=output.logprobs + 0.2 * noise[1],
        rollout_logprobs=output.logprobs + 0.2 * noise[4],
        values=worth.values + 0.2 * noise[2],
        returns=worth.values + noise[3],
        advantages=per_sequence[batch.segment_ids],
    )
    scores = torch.randint(0, 2, (SEQUENCES,), generator=generator).double()
    return SimpleNamespace(batch=batch, scores=scores, groups=torch.arange(SEQUENCES) % 5)


def random_experts(engines, batch, generator):
    """Return the experts that the routers choose, and others at random, some unknown; the same for equal prompts."""
    own = engines.mixture["router balance"].forward([batch])[0].routed_experts
    others = torch.rand(*own.shape[:2], EXPERTS, generator=generator).argsort(-1)[..., :TOP].to(own.dtype)
    others[batch.offsets[1:] - 1] = -1  # engines do not return those of the last token
    shared = find_shared_prompts(batch)
    return (own, others) if shared is None else [each[shared.computed][shared.rows] for each in (own, others)]


def random_cut(lengths, world, seed):
    """Return the micro-batches of each rank as lists of sequences; equally many on every rank, some empty."""
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
        local = [lengths[i] for i in share]
        pieces = [[share[i] for i in piece] for piece in (pack(local, budget) if by_tokens else chunk(local, size))]
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


def distances(engines, mini_batch, references, cuts, stride, first_seed):
    """Return all distances of each term in each mode; every split is tried with one in `stride` of them."""
    results = {}
    for seed in range(first_seed, first_seed + cuts):
        pieces = random_cut(mini_batch.batch.lengths.tolist(), dist.get_world_size(), seed)[dist.get_rank()]
        for index, (key, (term, objective)) in enumerate(objectives().items()):
            if index % stride == seed % stride:
                gradient = engines.gradient(term, micro_batches(engines.of(term), mini_batch, pieces, term), objective)
                results.setdefault(key, []).append(distance(gradient, references[key]))
    return results


def padded_gradients(directory, batches, size):
    """Return the gradients of the same losses on right-padded batches of `size`, with plain log-softmax."""
    kinds = {"critic": AutoModelForTokenClassification}
    actor, critic, reference, teacher, mixture = (
        kinds.get(name, AutoModelForCausalLM).from_pretrained(
            directory / name, dtype=torch.float32, attn_implementation="sdpa"
        )
        for name in ("model", "critic", "reference", "teacher", "mixture")
    )
    gradients = {}
    for key, (term, objective) in objectives().items():
        model, batch = mixture if term in MIXTURE else critic if term == "value" else actor, batches[key]
        totals = count_totals(batch.mask, batch.offsets)
        model.zero_grad()
        parts = [batch.select(range(start, min(start + size, len(batch)))) for start in range(0, len(batch), size)]
        other = teacher if term.startswith("distillation") else reference
        if term == "router balance":
            padded_balance(model, parts).backward()
        else:
            for part in parts:
                with replayed_experts(model, part):
                    objective(padded_output(model, other, part, term), part, totals)[0].backward()
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]
        gradients[key] = torch.cat([each.flatten() for each in grads])
    return gradients


def padded_balance(model, parts):
    """Return the loss of transformers for the routers of all `parts` together, averaged over layers."""
    layers = [[] for _ in model.model.layers]
    for part in parts:
        rows, real = padded(part)
        logits = model(input_ids=rows, attention_mask=real.long(), output_router_logits=True).router_logits
        for seen, each in zip(layers, logits, strict=True):
            seen.append(each[real.flatten()])
    return sum(load_balancing_loss_func((torch.cat(seen),), EXPERTS, TOP) for seen in layers) / len(layers)


@contextmanager
def replayed_experts(model, part):
    """Make the routers of a mixture use the experts of a padded batch, weighted by their own probabilities."""
    with ExitStack() as hooks:
        for index, layer in enumerate(model.model.layers if part.routed_experts is not None else ()):
            given = torch.full((padded(part)[1].numel(), TOP), -1)
            given[padded(part)[1].flatten()] = part.routed_experts[:, index].long()

            def route(module, args, output, given=given):
                chosen = torch.where(given < 0, output[2], given)
                probs = output[0].softmax(-1).gather(-1, chosen)
                return output[0], probs / probs.sum(-1, keepdim=True) if module.norm_topk_prob else probs, chosen

            hooks.callback(layer.mlp.gate.register_forward_hook(route).remove)
        yield


def padded(part):
    """Return the tokens in rows, and where they are real."""
    rows = torch.nn.utils.rnn.pad_sequence(part.tokens.split(part.lengths.tolist()), batch_first=True)
    return rows, torch.arange(rows.shape[1]) < part.lengths[:, None]


def padded_output(model, reference, part, term):
    rows, real = padded(part)

    def flat(values):
        """Return values of the state before each token, 0 for the first of a sequence."""
        return torch.nn.functional.pad(values, (1, 0))[real]

    logits = model(input_ids=rows, attention_mask=real.long()).logits[:, :-1]
    if term == "value":
        return ValueOutput(flat(logits.squeeze(-1)))
    log_p = logits.log_softmax(-1)
    with torch.no_grad():
        logits = reference(input_ids=rows, attention_mask=real.long()).logits[:, :-1, : log_p.shape[-1]]
        log_q = logits.log_softmax(-1)
    chosen = log_p.gather(-1, rows[:, 1:, None]).squeeze(-1)
    entropy, kl = -(log_p.exp() * log_p).sum(-1), (log_p.exp() * (log_p - log_q)).sum(-1)
    likely = log_q.topk(FORWARD.topk)
    forward = (likely.values.exp() * (likely.values - log_p.gather(-1, likely.indices))).sum(-1)
    return ModelOutput(flat(chosen), flat(entropy), flat(kl), flat(forward if term == "distillation forward" else kl))


def rank_main(rank, world, port, directory, cuts, stride):
    torch.set_num_threads(1)
    init_process_group(rank, world, "127.0.0.1", port)
    engines = Engines(directory)
    if world == 1:
        mini_batch, batches, references = random_mini_batch(engines), {}, {}
        for key, (term, objective) in objectives().items():
            (batches[key],) = micro_batches(engines.of(term), mini_batch, [range(SEQUENCES)], term)
            references[key] = engines.gradient(term, [batches[key]], objective)
        torch.save((mini_batch, batches, references), directory / "reference.pt")
    mini_batch, _, references = torch.load(directory / "reference.pt", weights_only=False)
    results = distances(engines, mini_batch, references, cuts, stride, first_seed=world * 10_000)
    if rank == 0:
        (directory / f"found-{world}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def run(world, directory, cuts, stride):
    if world == 1:
        rank_main(0, 1, free_port(), directory, cuts, stride)
    else:
        run_ranks(rank_main, world, world, free_port(), directory, cuts, stride, deadline_s=1800)
    return json.loads((directory / f"found-{world}.json").read_text())


def save_models(directory, **changes):
    """Save the models of `Engines`, with other sizes than the smallest if wanted."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=True, **changes)).save_pretrained(directory / "model")
    Qwen2ForTokenClassification(tiny_qwen2(num_labels=1, **changes)).save_pretrained(directory / "critic")
    Qwen2ForCausalLM(tiny_qwen2(tie_word_embeddings=False, **changes)).save_pretrained(directory / "reference")
    teacher = tiny_qwen2(hidden_size=96, num_hidden_layers=1, vocab_size=80, **changes)  # 16 ids are padding
    Qwen2ForCausalLM(teacher).save_pretrained(directory / "teacher")
    save_family("Qwen3-MoE", directory / "mixture", norm_topk_prob=True, **changes)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--short", action="store_true", help="fewer cuts, each term and mode in one of them on 1 and 2 ranks"
    )
    short = parser.parse_args().short
    cuts, stride, sizes = (12, 12, (5,)) if short else (100, 8, (1, 5, SEQUENCES))
    disable_progress_bar()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_models(directory)
        one, two = run(1, directory, cuts, stride), run(2, directory, cuts, stride)
        _, batches, references = torch.load(directory / "reference.pt", weights_only=False)
        by_padding = {key: [] for key in references}
        for size in sizes:
            for key, gradient in padded_gradients(directory, batches, size).items():
                by_padding[key].append(distance(gradient, references[key]))
    for key in references:
        print(f"{key:32} 1 rank {max(one[key]):.1e}   2 ranks {max(two[key]):.1e}   padded {max(by_padding[key]):.1e}")
    worst = [max(max(results[key]) for key in references) for results in (one, two, by_padding)]
    figures = {
        "terms": len(TERMS),
        "terms_and_modes": len(references),
        "cuts": 2 * cuts,
        "gradients_compared": sum(len(results[key]) for results in (one, two) for key in references),
        "worst_1_rank": worst[0],
        "worst_2_ranks": worst[1],
        "worst_padded": worst[2],
        "limit": LIMIT,
        "dtype": "float32",
        "seconds": round(time.monotonic() - start, 1),
    }
    finish("gradient", max(worst) <= LIMIT, **figures)


if __name__ == "__main__":
    main()
