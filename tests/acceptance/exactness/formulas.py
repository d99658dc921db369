"""Compare every formula with a slow reference: random cases, values and gradients, on one to three ranks.

make show-formulas [ARGS=--short]

The reference (tests/references.py) is plain Python on lists, with gradients by hand. A case is a random batch: several
turns, groups of one to six in any order, empty masks, equal scores, advantages of zero, log-ratios up to +-50. Formulas
of the whole batch run on one rank and then on two or three simulated ones, with sequences assigned at random, so that
some ranks have none. A difference is |ours - reference| / max(1, |reference|), the largest over all numbers of a case,
gradients included. All in float64.
"""

import argparse
import math
import multiprocessing
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from types import SimpleNamespace
from typing import get_args

import _common
import references as ref
import torch

from verl.algorithms import advantages, prepass
from verl.algorithms.aggregate import MODES, Totals, aggregate, count_totals
from verl.algorithms.correction import importance_weights, mismatch_metrics, mismatch_moments, rejection_mask
from verl.algorithms.losses import (
    KL_KINDS,
    PER_SEQUENCE,
    LossInputs,
    clamp_teacher_kl,
    estimate_teacher_kl,
    kl_penalty,
)
from verl.algorithms.objective import OutcomeObjective, PolicyObjective, ValueObjective
from verl.algorithms.settings import (
    AlgorithmSettings,
    Correction,
    Distillation,
    EstimatorOptions,
    KlController,
    LossOptions,
    Rejection,
)
from verl.algorithms.testing import run_on_ranks
from verl.config.schema.algorithm import RejectionKind
from verl.rewards.settings import OverlongPenalty
from verl.training.kernels.logprobs import LastLayer, token_logprobs, vocabulary_kl

UNBRANCHED = {  # every episode is one sequence
    "shares": None,
    "episode_tokens": None,
    "episode_log_ratio": None,
    "episode_lag": None,
    "rollout_logprobs": None,
}
LIMIT = 1e-6
CASES = 1000


# ------------------------------------------------------------------------------------------------- random cases


def random_batch(draw: random.Random, smallest_group: int = 1) -> list[ref.Response]:
    groups = []
    for _ in range(draw.randint(1, 4)):
        size = max(smallest_group, draw.choice([1, 2, 3, 4, 6]))
        groups += [draw.randrange(10**12)] * size
    draw.shuffle(groups)
    greedy = {group: draw.choice([0.0, 1.0, draw.gauss(0, 1)]) for group in groups}
    score = draw.choice(
        [
            lambda: float(draw.randint(0, 1)),
            lambda: draw.randint(-8, 8) / 8,
            lambda: draw.gauss(0, 1),
            lambda: 100 * draw.gauss(0, 1),
            lambda: 0.0,
            lambda: 0.1,
        ]
    )
    indices = random.Random(str(groups)).sample(range(1000), len(groups))
    return [
        replace(random_response(draw, group, score(), greedy[group]), index=index)
        for group, index in zip(groups, indices, strict=True)
    ]


def random_response(draw: random.Random, group: int, score: float, greedy: float) -> ref.Response:
    mask = random_mask(draw)
    indices = [t for t, m in enumerate(mask) if m]
    rewards = [0.0] * len(mask)
    if indices and draw.random() < 0.5:  # as after a KL penalty: nonzero on every token
        rewards = [draw.gauss(0, 0.3) if m else 0.0 for m in mask]
        score = math.fsum([*rewards, score])
    if indices:
        rewards[indices[-1]] += score - math.fsum(rewards)
    noise = [draw.random() for _ in mask]
    return ref.Response(
        group, score, mask, rewards, greedy=greedy, noise=noise, values=gauss(draw, mask), process=gauss(draw, mask)
    )


def random_turns(draw: random.Random, mask: list[int]) -> list[tuple[int, float, int]]:
    """Cut a response anywhere, into turns in few states."""
    last = len(mask) - 1
    ends = [*(t for t in range(last) if draw.random() < 0.3), last]
    return [(t, draw.randint(-4, 4) / 8, draw.choice([0, 1, 2**52])) for t in ends]


def random_component(draw: random.Random, name: str) -> float:
    """Return a value of one of three very different scales; the third is equal in many groups."""
    return {"a": draw.gauss(0, 1), "b": 100 * draw.gauss(5, 1), "c": float(draw.random() < 0.1)}[name]


def random_mask(draw: random.Random) -> list[int]:
    """Return a prompt, then turns of the model with tool output in between; or no generated tokens at all."""
    mask = [0] * draw.randint(0, 3)
    for _ in range(draw.randint(1, 3)):
        mask += [1] * draw.randint(1, 4) + [0] * draw.choice([0, 0, 1, 3])
    return [0] * len(mask) if draw.random() < 0.12 else mask


def gauss(draw: random.Random, mask: list[int]) -> list[float]:
    return [draw.gauss(0, 1) for _ in mask]


def with_policies(draw: random.Random, batch: list[ref.Response], *, per_sequence: bool = False) -> list[ref.Response]:
    """Add log-probs of four policies, near or very far; advantages in eighths, so that their sums are exact."""
    reach = draw.choice([0.0, 0.1, 0.5, 3.0, 50.0])
    scale = draw.choice([0, 1, 1, 1])
    constant = per_sequence or draw.random() < 0.5
    for x in batch:
        x.lp = [-5 * draw.random() for _ in x.mask]
        x.old, x.ref = ([lp + draw.uniform(-reach, reach) for lp in x.lp] for _ in range(2))
        x.roll = [old + draw.uniform(-reach, reach) for old in x.old]
        current = scale * draw.randint(-16, 16) / 8
        x.advantages = [current if constant else scale * draw.randint(-16, 16) / 8 for _ in x.mask]
    return batch


def random_numbers(draw: random.Random) -> ref.Numbers:
    lower = draw.uniform(-1, 1)
    return ref.Numbers(
        low=draw.uniform(0.05, 0.6),
        high=draw.uniform(0.05, 0.6),
        c=draw.uniform(1.5, 5),
        tau_pos=draw.uniform(0.3, 3),
        tau_neg=draw.uniform(0.3, 3),
        cov_share=draw.uniform(0, 0.5),
        cov_lb=lower,
        cov_ub=lower + draw.uniform(0, 3),
        kl_share=draw.uniform(0, 0.5),
        kl_coef=draw.uniform(0, 2),
        beta=draw.uniform(0.01, 1),
        eta=draw.uniform(0.1, 3),
    )


# --------------------------------------------------------------------------------------------- to verl's records


def options_of(n: ref.Numbers) -> LossOptions:
    return LossOptions(
        clip_low=n.low,
        clip_high=n.high,
        clip_c=n.c,
        tau_pos=n.tau_pos,
        tau_neg=n.tau_neg,
        clip_cov_ratio=n.cov_share,
        clip_cov_lb=n.cov_lb,
        clip_cov_ub=n.cov_ub,
        kl_cov_ratio=n.kl_share,
        ppo_kl_coef=n.kl_coef,
        dpo_beta=n.beta,
        sppo_eta=n.eta,
    )


def flat(batch: list[ref.Response], name: str) -> torch.Tensor:
    return torch.tensor([value for x in batch for value in getattr(x, name)], dtype=torch.float64)


def layout(batch: list[ref.Response]) -> tuple[torch.Tensor, torch.Tensor]:
    """mask [T], offsets [B+1]"""
    return flat(batch, "mask").bool(), torch.tensor([0, *(len(x.mask) for x in batch)]).cumsum(0)


def responses(batch: list[ref.Response], gather: Callable = lambda rows: rows) -> advantages.AdvantageInputs:
    """A batch without scores."""
    return episodes_of(batch, 0, gather, EstimatorOptions())


def episodes_of(
    batch: list[ref.Response], rank: int, gather: Callable, options: EstimatorOptions
) -> advantages.AdvantageInputs:
    mask, offsets = layout(batch)
    return advantages.AdvantageInputs(
        scores=torch.tensor([x.score for x in batch], dtype=torch.float64),
        groups=torch.tensor([x.group for x in batch], dtype=torch.int64),
        mask=mask,
        offsets=offsets,
        rewards=flat(batch, "rewards"),
        values=flat(batch, "values"),
        baselines=torch.tensor([x.greedy for x in batch], dtype=torch.float64),
        process=flat(batch, "process"),
        logprobs=flat(batch, "old"),
        sum_pi_squared=flat(batch, "squares"),
        importance=flat(batch, "importance"),
        turns=lay_turns(batch),
        episodes=torch.tensor([x.index for x in batch], dtype=torch.int64),
        components={
            name: torch.tensor([x.components[name] for x in batch], dtype=torch.float64)
            for name in options.component_weights
        },
        options=options,
        rank=rank,
        gather=gather,
    )


def lay_turns(batch: list[ref.Response]) -> torch.Tensor:
    starts = layout(batch)[1].tolist()
    rows = [
        (start + end, k, reward, state)
        for x, start in zip(batch, starts[:-1], strict=True)
        for k, (end, reward, state) in enumerate(x.turns)
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)


def tokens_of(batch: list[ref.Response]) -> LossInputs:
    columns = (flat(batch, name) for name in ("lp", "old", "advantages"))
    return LossInputs(*columns, *layout(batch), ref_logprobs=flat(batch, "ref"))


def assign_ranks(draw: random.Random, batch: list[ref.Response], ranks: int) -> list[list[ref.Response]]:
    order = draw.sample(batch, len(batch))
    owners = [draw.randrange(ranks) for _ in order]
    return [[x for x, owner in zip(order, owners, strict=True) if owner == rank] for rank in range(ranks)]


# ---------------------------------------------------------------------------------------------------- comparison


def difference(ours: object, expected: object) -> float:
    """Return the largest |ours - reference| / max(1, |reference|) over nested lists."""
    if isinstance(expected, (list, tuple)):
        assert len(ours) == len(expected), f"{len(ours)} numbers where the reference has {len(expected)}"
        return max((difference(a, b) for a, b in zip(ours, expected, strict=True)), default=0.0)
    gap = abs(float(ours) - float(expected)) / max(1.0, abs(float(expected)))
    return gap if math.isfinite(gap) else math.inf


def spread(draw, batch, run):
    """Yield (parts, results) of `run(part, rank, gather)` on one rank, and then on two or three."""
    yield [batch], [run(batch, 0, lambda rows: rows)]
    parts = assign_ranks(draw, batch, draw.choice([2, 3]))
    yield parts, run_on_ranks(parts, run)


def iter_rows(parts: list[list[ref.Response]], tensors: list[torch.Tensor]) -> dict[int, list[float]]:
    """Return the per-token results of all ranks, by response."""
    rows = {}
    for part, tensor in zip(parts, tensors, strict=True):
        for x, row in zip(part, tensor.split([len(x.mask) for x in part]), strict=True):
            rows[id(x)] = row.tolist()
    return rows


def on_all_ranks(draw, batch, run, expected) -> float:
    """Return the largest difference of `run(part, rank, gather)` -> per-token tensors from the reference."""
    worst = 0.0
    for parts, results in spread(draw, batch, run):
        for k, reference in enumerate(expected):
            rows = iter_rows(parts, [result[k] for result in results])
            worst = max(worst, difference([rows[id(x)] for x in batch], reference))
    return worst


# --------------------------------------------------------------------------------------- one case of each formula


def with_squares(draw: random.Random, batch: list[ref.Response]) -> None:
    """Draw the probability of each token, those of the others, and weights: of the mismatch, or 1."""
    weighs = draw.random() < 0.5
    for x in batch:
        chances = [draw.choice([draw.random(), 1.0, 1 - 1e-9]) for _ in x.mask]
        x.old = [math.log(chance or 1e-9) for chance in chances]
        x.squares = [chance**2 + draw.random() * (1 - chance) ** 2 for chance in chances]
        x.importance = [draw.uniform(0, 2) if weighs else 1.0 for _ in x.mask]


def estimator(ours, reference, *, by_std=True, smallest_group=1):
    """`reference(batch, options)` -> rows of advantages, or (advantages, returns)."""

    def case(draw: random.Random) -> float:
        batch = random_batch(draw, smallest_group)
        gamma, lam = draw.choice([1.0, draw.uniform(0.5, 1)]), draw.choice([1.0, draw.random()])
        coefs = {"outcome_coef": draw.uniform(0, 9), "process_coef": draw.uniform(0, 9)}
        coefs["step_weight"] = draw.uniform(0, 2)
        coefs["component_weights"] = {name: draw.uniform(-1, 3) for name in "abc"[: draw.randint(1, 3)]}
        for x in batch:
            x.turns = random_turns(draw, x.mask)
            x.components = {name: random_component(draw, name) for name in coefs["component_weights"]}
        options = EstimatorOptions(gamma=gamma, lam=lam, by_std=by_std, **coefs)
        if ours is advantages.optimal_token_baseline:
            with_squares(draw, batch)
        expected = reference(batch, options)

        def run(part, rank, gather):
            outcomes = ours(episodes_of(part, rank, gather, options))
            return outcomes if isinstance(outcomes, tuple) else (outcomes,)

        return on_all_ranks(draw, batch, run, expected if isinstance(expected, tuple) else (expected,))

    return case


def token_loss(name, reference):
    """`reference(batch, numbers)` -> (loss, derivative) of every token: every mode, with and without weights."""

    def case(draw: random.Random) -> float:
        batch, n = with_policies(draw, random_batch(draw)), random_numbers(draw)
        mode = "seq-mean-token-mean" if name in PER_SEQUENCE else draw.choice(MODES)
        scale, weights = draw.uniform(1, 50), random_weights(draw, batch)
        choose = {"clip_cov": ref.clip_cov_choice, "kl_cov": ref.kl_cov_choice}.get(name)
        for x, chosen in zip(batch, choose(batch, n) if choose else (), strict=bool(choose)):
            x.chosen = chosen
        losses, slopes = (times(rows, weights) for rows in reference(batch, n))
        gradient = times(slopes, ref.token_shares(batch, mode, scale))
        objective = PolicyObjective(
            AlgorithmSettings(loss_mode=name, loss_options=options_of(n), agg_mode=mode, scale=scale)
        )
        return policy(draw, batch, objective, weights, ref.aggregated(batch, losses, mode, scale), gradient)

    return case


def off_policy_mask(draw: random.Random) -> float:
    """A loss without the responses that are too unlikely now, which still count in its divisor."""
    name, batch, n = (
        draw.choice(["vanilla", "gspo", "gpg"]),
        with_policies(draw, random_batch(draw)),
        random_numbers(draw),
    )
    mode = "seq-mean-token-mean" if name in PER_SEQUENCE else draw.choice(MODES)
    scale, weights, threshold = draw.uniform(1, 50), random_weights(draw, batch), draw.uniform(0.001, 0.5)
    kept = [[1.0 - dropped for dropped in row] for row in ref.off_policy(batch, threshold)]
    losses, slopes = (times(times(rows, weights), kept) for rows in TOKEN_LOSSES[name](batch, n))
    options = replace(options_of(n), off_policy_mask_threshold=threshold)
    objective = PolicyObjective(AlgorithmSettings(loss_mode=name, loss_options=options, agg_mode=mode, scale=scale))
    gradient = times(slopes, ref.token_shares(batch, mode, scale))
    return policy(draw, batch, objective, weights, ref.aggregated(batch, losses, mode, scale), gradient)


def sequence_loss(name, reference):
    """`reference(batch, numbers)` -> loss of every sequence, and its derivative by every token's lp."""

    def case(draw: random.Random) -> float:
        batch, n = with_policies(draw, random_batch(draw), per_sequence=name != "geo_mean"), random_numbers(draw)
        weights = random_weights(draw, batch)
        losses, slopes = reference(batch, n)
        share = 1 / max(1, sum(x.length() > 0 for x in batch))
        mean = geometric_mean if name == "geo_mean" else ref.mean
        of_mean = [share * mean([w[t] for t in x.generated()] or [0]) for x, w in zip(batch, weights, strict=True)]
        value = math.fsum(w * loss for w, loss in zip(of_mean, losses, strict=True))
        gradient = [[w * slope for slope in row] for w, row in zip(of_mean, slopes, strict=True)]
        objective = PolicyObjective(AlgorithmSettings(loss_mode=name, loss_options=options_of(n)))
        return policy(draw, batch, objective, weights, value, gradient)

    return case


def dpo(draw: random.Random) -> float:
    batch, n = with_policies(draw, random_batch(draw)), random_numbers(draw)
    orders = prepass.token_noise(
        *(torch.tensor(names) for names in zip(*((x.group, x.index) for x in batch), strict=True))
    )
    batch = [replace(x, order=order) for x, order in zip(batch, orders.tolist(), strict=True)]
    value, gradient = ref.dpo(batch, n)
    ones = [[1.0] * len(x.mask) for x in batch]
    objective = PolicyObjective(AlgorithmSettings(loss_mode="dpo", loss_options=options_of(n)))
    return policy(draw, batch, objective, ones, value, gradient)


def random_weights(draw, batch):
    some = draw.random() < 0.5
    return [[draw.uniform(0, 2) if some else 1.0 for _ in x.mask] for x in batch]


def geometric_mean(values):
    return math.exp(ref.mean([math.log(value) for value in values])) if all(values) else 0.0


def times(a, b):
    return [[x * y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]


def policy(draw, batch, objective, weights, value, gradient) -> float:
    """Compare value and gradient of an objective on a mini-batch split into micro-batches.

    A prepass runs on one rank and on several, with a micro-batch on each.
    """
    look = prepass.PREPASSES.get(objective.algorithm.loss_mode)
    weight_of = {id(x): row for x, row in zip(batch, weights, strict=True)}

    def run(part, rank, gather):
        episodes = episodes_of(part, rank, gather, EstimatorOptions())
        return look(tokens_of(part), episodes, flat(part, "noise"), objective.algorithm.loss_options)

    def cuts():
        if look is not None:
            return spread(draw, batch, run)
        parts = assign_ranks(draw, batch, draw.randint(1, 3))
        return [(parts, [prepass.PrepassResult({}, {})] * len(parts))]

    worst = 0.0
    for parts, outcomes in cuts():
        micro_batches = []
        for part, seen in zip(parts, outcomes, strict=True):
            mask, offsets = layout(part)
            fields = {
                "mask": mask,
                "offsets": offsets,
                "old_logprobs": flat(part, "old"),
                "ref_logprobs": flat(part, "ref"),
                "advantages": flat(part, "advantages"),
                "weights": torch.tensor([w for x in part for w in weight_of[id(x)]], dtype=torch.float64),
                "selected": None,
                **UNBRANCHED,
                "rollout_logprobs": flat(part, "roll"),
            }
            micro_batches.append(SimpleNamespace(**(fields | seen.fields)))
        totals = [count_totals(micro.mask, micro.offsets) for micro in micro_batches]
        whole = Totals(sum(t.tokens for t in totals), sum(t.sequences for t in totals))
        shares, slopes = [], []
        for part, micro in zip(parts, micro_batches, strict=True):
            output = SimpleNamespace(logprobs=flat(part, "lp").requires_grad_(), entropy=torch.zeros(len(micro.mask)))
            loss, _ = objective(output, micro, whole)
            shares.append(loss.item())
            slopes.append(torch.autograd.grad(loss, output.logprobs)[0])
        ours = outcomes[0].metrics["actor/dpo_loss"] if objective.algorithm.loss_mode == "dpo" else math.fsum(shares)
        rows = iter_rows(parts, slopes)
        worst = max(worst, difference(ours, value), difference([rows[id(x)] for x in batch], gradient))
        if objective.algorithm.loss_mode in ("clip_cov", "kl_cov"):
            chosen = iter_rows(parts, [micro.selected for micro in micro_batches])
            worst = max(worst, difference([chosen[id(x)] for x in batch], [x.chosen for x in batch]))
    return worst


def objective(draw: random.Random) -> float:
    """Policy loss - coefficient * entropy + coefficient * KL, each in the objective's mode; and the metrics."""
    batch, n = with_policies(draw, random_batch(draw)), random_numbers(draw)
    mode, scale, form = draw.choice(MODES), draw.uniform(1, 50), draw.choice(KL_FORMS)
    coefficients = draw.uniform(0.1, 2), draw.uniform(0, 2)
    entropy = [gauss(draw, x.mask) for x in batch]
    shares = ref.token_shares(batch, mode, scale)
    losses, slopes = ref.token_losses(batch, "vanilla", n)
    kls, kl_slopes = kl_rows(batch, form)
    parts = (ref.aggregated(batch, rows, mode, scale) for rows in (losses, entropy, kls))
    value = math.fsum(c * part for c, part in zip((1, -coefficients[0], coefficients[1]), parts, strict=True))
    gradient = [
        [share * (a + coefficients[1] * b) for share, a, b in zip(*rows, strict=True)]
        for rows in zip(shares, slopes, kl_slopes, strict=True)
    ]
    lp = flat(batch, "lp").requires_grad_()
    spread = torch.tensor([e for row in entropy for e in row], dtype=torch.float64, requires_grad=True)
    mask, offsets = layout(batch)
    names = {"old_logprobs": "old", "ref_logprobs": "ref", "advantages": "advantages"}
    micro = SimpleNamespace(
        mask=mask,
        offsets=offsets,
        weights=None,
        selected=None,
        **UNBRANCHED,
        **{k: flat(batch, v) for k, v in names.items()},
    )
    ours = PolicyObjective(
        AlgorithmSettings(
            loss_options=options_of(n),
            agg_mode=mode,
            scale=scale,
            entropy_coeff=coefficients[0],
            loss_kl_coef=coefficients[1],
            loss_kl_type=form,
        )
    )
    loss, metrics = ours(SimpleNamespace(logprobs=lp, entropy=spread), micro, count_totals(mask, offsets))
    by_lp, by_entropy = torch.autograd.grad(loss, (lp, spread))
    seen = ref.clip_fractions(batch, n)
    report = {
        "actor/pg_clipfrac_upper": seen["upper"],
        "actor/pg_clipfrac_lower": seen["dual"],
        "actor/ppo_kl": seen["kl"],
        "actor/entropy": ref.aggregated(batch, entropy, "token-mean", 1.0),
    }
    return max(
        difference(loss.item(), value),
        difference(by_lp.tolist(), [g for row in gradient for g in row]),
        difference(by_entropy.tolist(), [-coefficients[0] * share for row in shares for share in row]),
        difference([metrics[name] for name in report], [*report.values()]),
    )


def kl_rows(batch, form):
    pairs = [[ref.kl(x.lp[t], x.ref[t], form) for t in range(len(x.mask))] for x in batch]
    return [[value for value, _ in row] for row in pairs], [[slope for _, slope in row] for row in pairs]


def kl_form(form):
    def case(draw: random.Random) -> float:
        batch = with_policies(draw, random_batch(draw))
        values, slopes = kl_rows(batch, form)
        lp = flat(batch, "lp").requires_grad_()
        ours = kl_penalty(lp, flat(batch, "ref"), form)
        (gradient,) = torch.autograd.grad(ours.sum(), lp)
        return max(
            difference(ours.tolist(), [value for row in values for value in row]),
            difference(gradient.tolist(), [slope for row in slopes for slope in row]),
        )

    return case


def exact_kl(draw: random.Random) -> float:
    """The KL over the vocabulary, whose logits are hidden states times a weight, here the identity."""
    size, positions, reach = draw.randint(1, 12), draw.randint(1, 5), draw.choice([0.1, 1.0, 10.0, 100.0])
    rows, others = ([[reach * draw.gauss(0, 1) for _ in range(size)] for _ in range(positions)] for _ in range(2))
    outcomes = [ref.exact_kl(*pair) for pair in zip(rows, others, strict=True)]
    unit = torch.eye(size, dtype=torch.float64)
    current = LastLayer(torch.tensor(rows, dtype=torch.float64).requires_grad_(), unit)
    ours = vocabulary_kl(current, LastLayer(torch.tensor(others, dtype=torch.float64), unit), chunk=draw.randint(1, 5))
    (gradient,) = torch.autograd.grad(ours.sum(), current.hidden)
    return max(
        difference(ours.tolist(), [value for value, _ in outcomes]),
        difference(gradient.flatten().tolist(), [slope for _, slopes in outcomes for slope in slopes]),
    )


def teacher_kl(draw: random.Random) -> float:
    """The exact KL to a teacher whose vocabulary has other padding: over the tokens that both have."""
    size, positions, reach = draw.randint(1, 12), draw.randint(1, 5), draw.choice([0.1, 1.0, 10.0])
    sizes = size + draw.randint(0, 4), size
    sizes = draw.choice([sizes, sizes[::-1]])
    rows, others = ([[reach * draw.gauss(0, 1) for _ in range(each)] for _ in range(positions)] for each in sizes)
    outcomes = [ref.exact_kl(row[:size], other[:size]) for row, other in zip(rows, others, strict=True)]
    layers = [
        LastLayer(torch.tensor(each, dtype=torch.float64).requires_grad_(), torch.eye(width, dtype=torch.float64))
        for each, width in zip((rows, others), sizes, strict=True)
    ]
    ours = vocabulary_kl(*layers, chunk=draw.randint(1, 5))
    (gradient,) = torch.autograd.grad(ours.sum(), layers[0].hidden)
    return max(
        difference(ours.tolist(), [value for value, _ in outcomes]),
        difference(gradient[:, :size].flatten().tolist(), [slope for _, slopes in outcomes for slope in slopes]),
        float(gradient[:, size:].abs().sum()),
    )


def clamped_teacher_kl(draw: random.Random) -> float:
    """The exact KL to a teacher with a floor of log-probs and a bound of each token, where it has no gradient."""
    size, positions, reach = draw.randint(1, 12), draw.randint(1, 5), draw.choice([1.0, 10.0])
    rows, others = ([[reach * draw.gauss(0, 1) for _ in range(size)] for _ in range(positions)] for _ in range(2))
    floor, bound = -draw.uniform(0.1, 12), draw.uniform(0.01, 12)
    outcomes = [ref.exact_kl(*pair, floor) for pair in zip(rows, others, strict=True)]
    unit = torch.eye(size, dtype=torch.float64)
    current = LastLayer(torch.tensor(rows, dtype=torch.float64).requires_grad_(), unit)
    other = LastLayer(torch.tensor(others, dtype=torch.float64), unit, floor=floor)
    ours, _ = clamp_teacher_kl(
        vocabulary_kl(current, other, chunk=draw.randint(1, 5)), Distillation("loss", loss_max_clamp=bound)
    )
    (gradient,) = torch.autograd.grad(ours.sum(), current.hidden)
    slopes = [slope if abs(value) <= bound else 0.0 for value, slopes in outcomes for slope in slopes]
    return max(
        difference(ours.tolist(), [ref.clip(value, -bound, bound) for value, _ in outcomes]),
        difference(gradient.flatten().tolist(), slopes),
    )


def forward_teacher_kl(draw: random.Random) -> float:
    """The KL from a teacher over its most likely tokens, or all, with a floor of log-probs or without."""
    size, positions, reach = draw.randint(1, 12), draw.randint(1, 5), draw.choice([0.1, 1.0, 10.0])
    rows, others = ([[reach * draw.gauss(0, 1) for _ in range(size)] for _ in range(positions)] for _ in range(2))
    topk, floor = draw.choice([None, draw.randint(1, size + 2)]), draw.choice([None, -draw.uniform(0.1, 12)])
    limit, bound = size if topk is None else topk, -math.inf if floor is None else floor
    outcomes = [ref.forward_kl(*pair, limit, bound) for pair in zip(rows, others, strict=True)]
    unit = torch.eye(size, dtype=torch.float64)
    current = LastLayer(torch.tensor(rows, dtype=torch.float64).requires_grad_(), unit)
    other = LastLayer(torch.tensor(others, dtype=torch.float64), unit, floor=floor, is_forward=True, topk=topk)
    ours = vocabulary_kl(current, other, chunk=draw.randint(1, 5))
    (gradient,) = torch.autograd.grad(ours.sum(), current.hidden)
    return max(
        difference(ours.tolist(), [value for value, _ in outcomes]),
        difference(gradient.flatten().tolist(), [slope for _, slopes in outcomes for slope in slopes]),
    )


def over_kept(draw: random.Random) -> float:
    """Log-prob, entropy and KL over the tokens that sampling kept, of which some are repeated."""
    size, positions, reach = draw.randint(1, 12), draw.randint(1, 5), draw.choice([0.1, 1.0, 10.0, 100.0])
    rows, others = ([[reach * draw.gauss(0, 1) for _ in range(size)] for _ in range(positions)] for _ in range(2))
    width = draw.randint(1, size + 2)
    kept = [draw.choices(range(size), k=width) for _ in range(positions)]
    outcomes = [ref.over_kept(*row, row[2][0]) for row in zip(rows, others, kept, strict=True)]
    unit, ids, chunk = torch.eye(size, dtype=torch.float64), torch.tensor(kept), draw.randint(1, 5)
    current = LastLayer(torch.tensor(rows, dtype=torch.float64).requires_grad_(), unit, kept=ids)
    kl = vocabulary_kl(current, LastLayer(torch.tensor(others, dtype=torch.float64), unit, kept=ids), chunk=chunk)
    ours = torch.stack([*token_logprobs(current, ids[:, 0], chunk=chunk), kl], 1)
    (gradient,) = torch.autograd.grad(ours.sum(), current.hidden)
    return max(
        difference(ours.flatten().tolist(), [value for values, _ in outcomes for value in values]),
        difference(gradient.flatten().tolist(), [slope for _, slopes in outcomes for slope in slopes]),
    )


def sampled_teacher_kl(draw: random.Random) -> float:
    """The KL to a teacher at the sampled tokens, with a floor of log-probs and a bound of each token."""
    batch, floor, bound = with_policies(draw, random_batch(draw)), -draw.uniform(0.1, 12), draw.uniform(0.01, 12)
    options = Distillation(log_prob_min_clamp=floor, loss_max_clamp=bound)
    ours, is_clamped = clamp_teacher_kl(estimate_teacher_kl(flat(batch, "old"), flat(batch, "ref"), options), options)
    pairs = [pair for x in batch for pair in zip(x.old, x.ref, strict=True)]
    gaps = [max(old, floor) - max(other, floor) for old, other in pairs]
    return max(
        difference(ours.tolist(), [ref.clip(gap, -bound, bound) for gap in gaps]),
        difference(is_clamped.tolist(), [abs(gap) > bound for gap in gaps]),
    )


def aggregation(mode):
    def case(draw: random.Random) -> float:
        batch, scale = random_batch(draw), draw.uniform(1, 50)
        rows = [gauss(draw, x.mask) for x in batch]
        values = torch.tensor([v for row in rows for v in row], dtype=torch.float64, requires_grad=True)
        mask, offsets = layout(batch)
        ours = aggregate(values, mask, offsets, mode, count_totals(mask, offsets), scale=scale)
        (gradient,) = torch.autograd.grad(ours, values)
        shares = ref.token_shares(batch, mode, scale)
        return max(
            difference(ours.item(), ref.aggregated(batch, rows, mode, scale)),
            difference(gradient.tolist(), [share for row in shares for share in row]),
        )

    return case


def value_loss(draw: random.Random) -> float:
    batch, mode, scale, eps = random_batch(draw), draw.choice(MODES), draw.uniform(1, 50), draw.uniform(0.01, 2)
    now, returns = ([gauss(draw, x.mask) for x in batch] for _ in range(2))
    pairs = [
        [ref.value_loss(*numbers, eps) for numbers in zip(row, x.values, target, strict=True)]
        for x, row, target in zip(batch, now, returns, strict=True)
    ]
    losses, slopes = ([[pair[k] for pair in row] for row in pairs] for k in range(2))
    gradient = times(slopes, ref.token_shares(batch, mode, scale))
    values = torch.tensor([v for row in now for v in row], dtype=torch.float64, requires_grad=True)
    mask, offsets = layout(batch)
    target = torch.tensor([v for row in returns for v in row], dtype=torch.float64)
    micro = SimpleNamespace(mask=mask, offsets=offsets, values=flat(batch, "values"), returns=target, **UNBRANCHED)
    loss, _ = ValueObjective(AlgorithmSettings(value_clip=eps, value_agg_mode=mode, scale=scale))(
        SimpleNamespace(values=values), micro, count_totals(mask, offsets)
    )
    (ours,) = torch.autograd.grad(loss, values)
    return max(
        difference(loss.item(), ref.aggregated(batch, losses, mode, scale)),
        difference(ours.tolist(), [g for row in gradient for g in row]),
    )


def outcome(draw: random.Random) -> float:
    batch, beta = with_policies(draw, random_batch(draw)), draw.uniform(0.01, 1)
    for x in batch:
        x.score = min(max(x.score, 0.0), 1.0)
    value, gradient = ref.outcome_loss(batch, beta)
    mask, offsets = layout(batch)
    outcomes = torch.tensor([x.score for x in batch for _ in x.mask], dtype=torch.float64)
    lp = flat(batch, "lp").requires_grad_()
    micro = SimpleNamespace(
        mask=mask,
        offsets=offsets,
        old_logprobs=flat(batch, "ref"),
        advantages=outcomes,
        ref_logprobs=None,
        selected=None,
        **UNBRANCHED,
    )
    loss, _ = OutcomeObjective(beta)(SimpleNamespace(logprobs=lp), micro, count_totals(mask, offsets))
    (ours,) = torch.autograd.grad(loss, lp)
    return max(difference(loss.item(), value), difference(ours.tolist(), [g for row in gradient for g in row]))


def weights(level, normalize):
    def case(draw: random.Random) -> float:
        batch, threshold = with_policies(draw, random_batch(draw)), draw.uniform(1, 5)
        lower = draw.random() if level == "icepop" else None
        c = Correction("sequence" if level == "sequence" else "token", threshold, lower, normalize)
        expected = (
            ref.icepop_weights(batch, c.threshold_lower, threshold)
            if level == "icepop"
            else ref.importance_weights(batch, level, threshold, normalize)
        )

        def run(part, rank, gather):
            return (importance_weights(responses(part, gather), flat(part, "old"), flat(part, "roll"), c),)

        return on_all_ranks(draw, batch, run, (expected,))

    return case


def rejection(level):
    def case(draw: random.Random) -> float:
        batch = with_policies(draw, random_batch(draw))
        lower, upper = draw.uniform(0, 1), draw.choice([0.01, draw.uniform(1, 5)])
        criterion = Rejection(level, 0.0 if level.endswith(("k2", "k3")) else lower, upper)
        ours = rejection_mask(responses(batch), flat(batch, "old"), flat(batch, "roll"), [criterion])
        expected = ref.rejection_mask(batch, level, lower, upper)
        return difference(ours.tolist(), [value for row in expected for value in row])

    return case


def mismatch(draw: random.Random) -> float:
    batch = with_policies(draw, random_batch(draw))
    for x in batch:
        x.old, x.roll = ([min(lp, 0.0) for lp in row] for row in (x.old, x.roll))

    def run(part, rank, gather):
        return mismatch_metrics(gather(mismatch_moments(responses(part), flat(part, "old"), flat(part, "roll"))[None]))

    worst = 0.0
    for _, results in spread(draw, batch, run):
        for ours in results:
            if not ours:
                assert not any(x.length() for x in batch)
                continue
            expected = ref.mismatch(batch)
            pairs = {
                "training/rollout_probs_diff_mean": expected.diff_mean,
                "training/rollout_probs_diff_max": expected.diff_max,
                "training/rollout_ess": expected.ess,
                "training/rollout_probs_corr": expected.pearson,
            }
            names = [name for name in pairs if name in ours]  # a constant has no correlation
            worst = max(worst, difference([ours[name] for name in names], [pairs[name] for name in names]))
    return worst


def controller(draw: random.Random) -> float:
    ours = KlController(draw.uniform(1e-3, 1), True, target=draw.uniform(1e-3, 1), horizon=draw.uniform(100, 1e5))
    expected, worst = ours.beta, 0.0
    for _ in range(10):
        seen, samples = (
            draw.choice([0.0, draw.uniform(0, 2) * ours.target, draw.uniform(-1, 10)]),
            draw.randint(1, 1024),
        )
        expected = ref.next_beta(expected, seen, ours.target, ours.horizon, samples)
        ours = ours.after(seen, samples)
        worst = max(worst, difference(ours.beta, expected))
    return worst


def overlong(draw: random.Random) -> float:
    longest = draw.randint(2, 400)
    length, buffer, factor = draw.randint(0, 500), draw.randint(1, longest), draw.uniform(0.1, 3)
    ours = OverlongPenalty(buffer, factor, longest).compute(length)
    return difference(ours, ref.compute_overlong_penalty(length, longest, buffer, factor))


KL_FORMS = [name + plus for name in KL_KINDS for plus in ("", "+")]
TOKEN_LOSSES = {
    **{name: lambda batch, n, name=name: ref.token_losses(batch, name, n) for name in ref.TOKEN_LOSSES},
    "gspo": ref.gspo,
    "clip_cov": ref.clip_cov,
    "kl_cov": ref.kl_cov,
}
FORMULAS: dict[str, Callable[[random.Random], float]] = {
    "gae": estimator(advantages.gae, lambda batch, o: ref.gae(batch, gamma=o.gamma, lam=o.lam)),
    "grpo": estimator(advantages.grpo, lambda batch, o: ref.grpo(batch, by_std=True)),
    "grpo without std": estimator(advantages.grpo, lambda batch, o: ref.grpo(batch, by_std=False), by_std=False),
    "rloo": estimator(advantages.rloo, lambda batch, o: ref.rloo(batch)),
    "opo": estimator(advantages.opo, lambda batch, o: ref.opo(batch)),
    "optimal_token_baseline": estimator(
        advantages.optimal_token_baseline, lambda batch, o: ref.optimal_token_baseline(batch)
    ),
    "gpg": estimator(advantages.gpg, lambda batch, o: ref.gpg(batch)),
    "grpo_passk": estimator(
        advantages.grpo_passk, lambda batch, o: ref.grpo_passk(batch, by_std=True), smallest_group=2
    ),
    "grpo_passk without std": estimator(
        advantages.grpo_passk, lambda batch, o: ref.grpo_passk(batch, by_std=False), by_std=False, smallest_group=2
    ),
    "reinforce_plus_plus": estimator(
        advantages.reinforce_plus_plus, lambda batch, o: ref.reinforce_plus_plus(batch, gamma=o.gamma)
    ),
    "reinforce_plus_plus_baseline": estimator(
        advantages.reinforce_plus_plus_baseline, lambda batch, o: ref.reinforce_plus_plus_baseline(batch)
    ),
    "remax": estimator(advantages.remax, lambda batch, o: ref.remax(batch)),
    "prime": estimator(
        advantages.prime,
        lambda batch, o: ref.prime(batch, gamma=o.gamma, outcome=o.outcome_coef, process=o.process_coef),
    ),
    "gdpo": estimator(advantages.gdpo, lambda batch, o: ref.gdpo(batch, o.component_weights)),
    **{
        f"gigpo{'' if by_std else ' without std'}": estimator(
            advantages.gigpo,
            lambda batch, o: ref.gigpo(batch, gamma=o.gamma, weight=o.step_weight, by_std=o.by_std),
            by_std=by_std,
        )
        for by_std in (True, False)
    },
    "no_rewards": estimator(advantages.no_rewards, lambda batch, o: [[0.0] * len(x.mask) for x in batch]),
    "win_rate": estimator(advantages.win_rate, lambda batch, o: ref.win_rate(batch)),
    **{f"loss {name}": token_loss(name, reference) for name, reference in TOKEN_LOSSES.items()},
    "loss without off-policy sequences": off_policy_mask,
    "loss geo_mean": sequence_loss("geo_mean", ref.geo_mean),
    "loss sppo": sequence_loss("sppo", ref.sppo),
    "loss dpo": dpo,
    "loss value": value_loss,
    "loss of a process reward model": outcome,
    "objective and its report": objective,
    **{f"kl {form}": kl_form(form) for form in KL_FORMS},
    "kl full": exact_kl,
    "kl to a teacher": teacher_kl,
    "kl to a teacher, clamped": clamped_teacher_kl,
    "kl from a teacher": forward_teacher_kl,
    "kl to a teacher, sampled, clamped": sampled_teacher_kl,
    "log-prob, entropy, kl of kept tokens": over_kept,
    **{f"aggregation {mode}": aggregation(mode) for mode in MODES},
    **{
        f"weights {level}{', mean 1' if normalize else ''}": weights(level, normalize)
        for level in ("token", "sequence")
        for normalize in (False, True)
    },
    "weights icepop": weights("icepop", False),
    **{f"rejection {level}": rejection(level) for level in get_args(RejectionKind)},
    "mismatch": mismatch,
    "kl controller": controller,
    "overlong penalty": overlong,
}


def worst_of(name: str, cases: int) -> float:
    torch.set_num_threads(1)
    return max(FORMULAS[name](random.Random(f"{name} {seed}")) for seed in range(cases))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="a tenth of the cases")
    cases = CASES // 10 if parser.parse_args().short else CASES
    start, worst = time.monotonic(), {}
    print(f"{'formula':36} {'cases':>6} {'largest difference':>20}")
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for name, gap in zip(FORMULAS, pool.map(worst_of, FORMULAS, repeat(cases)), strict=True):
            worst[name] = gap
            print(f"{name:36} {cases:6} {gap:20.1e}", flush=True)
    _common.finish(
        "formulas",
        max(worst.values()) <= LIMIT,
        formulas=len(worst),
        cases=cases * len(worst),
        largest_difference=max(worst.values()),
        limit=LIMIT,
        dtype="float64",
        seconds=round(time.monotonic() - start, 1),
    )


if __name__ == "__main__":
    main()
