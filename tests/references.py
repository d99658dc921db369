"""Reference implementations of every formula: loops over plain lists, only `math`, gradients by hand.

Written from the formulas and not from verl's code, so that their agreement is evidence. A batch is a list of
`Response`s, one per sequence; per-token results are lists of lists of the same shape, 0 at tokens that the model did
not generate. sg[...] in a formula is a factor that the derivative treats as constant.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

Rows = list[list[float]]


@dataclass
class Response:
    """One sequence: its prompt (`group`), its score, and per-token log-probs, values and rewards."""

    group: int
    score: float
    mask: list[int]
    rewards: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    process: list[float] = field(default_factory=list)  # token rewards of a process reward model
    components: dict[str, float] = field(default_factory=dict)  # the parts of its reward
    turns: list[tuple[int, float, int]] = field(default_factory=list)  # last token, reward, state
    greedy: float = 0.0  # the score of the greedy response to the same prompt
    lp: list[float] = field(default_factory=list)
    old: list[float] = field(default_factory=list)
    ref: list[float] = field(default_factory=list)
    roll: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)  # sums of the squared probabilities of the vocabulary
    importance: list[float] = field(default_factory=list)  # weights of rollout correction
    advantages: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)  # one random number per token
    index: int = 0  # of its episode in the group
    order: float = 0.0  # a random number of the episode
    chosen: list[bool] = field(default_factory=list)

    def generated(self) -> list[int]:
        return [t for t, m in enumerate(self.mask) if m]

    def length(self) -> int:
        return len(self.generated())

    def per_token(self, value: float) -> list[float]:
        return [value if m else 0.0 for m in self.mask]


Batch = Sequence[Response]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def sign(value: float) -> float:
    return math.copysign(1, value) if value else 0.0


def sigmoid(value: float) -> float:
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))


def log_sigmoid(value: float) -> float:
    return min(value, 0.0) - math.log1p(math.exp(-abs(value)))


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def unbiased_variance(values: Sequence[float]) -> float:
    center = mean(values)
    return math.fsum((value - center) ** 2 for value in values) / (len(values) - 1)


# ---------------------------------------------------------------------------------------------------- advantages


def by_group(batch: Batch) -> Iterator[list[Response]]:
    groups: dict[int, list[Response]] = defaultdict(list)
    for response in batch:
        groups[response.group].append(response)
    yield from groups.values()


def of_groups(batch: Batch, formula: Callable[[list[Response]], list[float]]) -> Rows:
    """Return one advantage per response, computed from its group, on all of its generated tokens."""
    values = per_response(batch, formula)
    return [response.per_token(value) for response, value in zip(batch, values, strict=True)]


def per_response(batch: Batch, formula: Callable[[list[Response]], list[float]]) -> list[float]:
    results = {}
    for group in by_group(batch):
        for response, advantage in zip(group, formula(group), strict=True):
            results[id(response)] = advantage
    return [results[id(response)] for response in batch]


def grpo(batch: Batch, *, by_std: bool) -> Rows:
    def formula(group: list[Response]) -> list[float]:
        scores = [response.score for response in group]
        if len(scores) == 1:
            return scores
        center = mean(scores)
        scale = math.sqrt(unbiased_variance(scores)) + 1e-6 if by_std else 1.0
        return [(score - center) / scale for score in scores]

    return of_groups(batch, formula)


def rloo(batch: Batch) -> Rows:
    def formula(group: list[Response]) -> list[float]:
        n = len(group)
        if n == 1:
            return [group[0].score]
        center = mean([response.score for response in group])
        return [n / (n - 1) * (response.score - center) for response in group]

    return of_groups(batch, formula)


def opo(batch: Batch) -> Rows:
    def formula(group: list[Response]) -> list[float]:
        tokens = sum(response.length() for response in group)
        if tokens == 0:
            return [0.0] * len(group)
        if len(group) == 1:
            return [group[0].score]
        baseline = math.fsum(response.length() * response.score for response in group) / tokens
        return [response.score - baseline for response in group]

    return of_groups(batch, formula)


def optimal_token_baseline(batch: Batch) -> Rows:
    """G_k - sum(G_k * W_k) / (sum(W_k) + 1e-8) over the k-th generated tokens of the group; alone, G_k.

    W_k = sum over j <= k of importance_j^2 * (1 - 2 p_j + squares_j).
    """
    rows = {id(response): [0.0] * len(response.mask) for response in batch}
    for group in by_group(batch):
        to_go = [returns_to_go(response, 1.0) for response in group]
        for k in range(max(response.length() for response in group)):
            reaching = [(x, gains) for x, gains in zip(group, to_go, strict=True) if x.length() > k]
            total = weight = 0.0
            for response, gains in reaching:
                steps = response.generated()
                w = math.fsum(
                    response.importance[t] ** 2 * (1 - 2 * math.exp(response.old[t]) + response.squares[t])
                    for t in steps[: k + 1]
                )
                total, weight = total + gains[steps[k]] * w, weight + w
            baseline = total / (weight + 1e-8) if len(reaching) > 1 else 0.0
            for response, gains in reaching:
                t = response.generated()[k]
                rows[id(response)][t] = gains[t] - baseline
    return [rows[id(response)] for response in batch]


def gpg(batch: Batch) -> Rows:
    non_zero = sum(response.score != 0 for response in batch)
    scale = len(batch) / max(1, non_zero)

    def formula(group: list[Response]) -> list[float]:
        center = mean([response.score for response in group]) if len(group) > 1 else 0.0
        return [scale * (response.score - center) for response in group]

    return of_groups(batch, formula)


def grpo_passk(batch: Batch, *, by_std: bool) -> Rows:
    def formula(group: list[Response]) -> list[float]:
        scores = [response.score for response in group]
        best, second = sorted(scores, reverse=True)[:2]
        scale = math.sqrt(unbiased_variance(scores)) + 1e-6 if by_std else 1.0
        advantages = [0.0] * len(scores)
        advantages[scores.index(best)] = (best - second) / scale
        return advantages

    return of_groups(batch, formula)


def gigpo(batch: Batch, *, gamma: float, weight: float, by_std: bool) -> Rows:
    """GRPO + weight * the same formula on the returns of all turns of the group in one state; 0 for one alone."""
    rows = grpo(batch, by_std=by_std)
    position = {id(x): index for index, x in enumerate(batch)}
    for group in by_group(batch):
        alike = defaultdict(list)
        for x in group:
            rewards = [reward for _, reward, _ in x.turns]
            rewards[-1] += x.score - math.fsum(rewards)
            for k, (end, _, state) in enumerate(x.turns):
                gain = math.fsum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards)))
                alike[state].append((x, 0 if k == 0 else x.turns[k - 1][0] + 1, end, gain))
        for turns in alike.values():
            gains = [gain for *_, gain in turns]
            if len(gains) == 1:
                continue
            scale = math.sqrt(unbiased_variance(gains)) + 1e-6 if by_std else 1.0
            for x, start, end, gain in turns:
                for t in range(start, end + 1):
                    rows[position[id(x)]][t] += x.mask[t] * weight * (gain - mean(gains)) / scale
    return rows


def win_rate(batch: Batch) -> Rows:
    def formula(group: list[Response]) -> list[float]:
        rates = []
        for i, current in enumerate(group):
            wins = []
            for j, other in enumerate(group):
                if i != j:
                    wins.append(1.0 if current.score > other.score else 0.5 if current.score == other.score else 0.0)
            rates.append(mean(wins) - 0.5 if wins else 0.0)
        return rates

    return of_groups(batch, formula)


def whitened(batch: Batch, rows: Rows) -> Rows:
    """Whiten over all generated tokens of the batch, with the unbiased variance + 1e-8."""
    seen = [rows[i][t] for i, response in enumerate(batch) for t in response.generated()]
    if not seen:
        return rows
    center = mean(seen)
    scale = math.sqrt((unbiased_variance(seen) if len(seen) > 1 else 0.0) + 1e-8)
    return [
        [(value - center) / scale if m else 0.0 for value, m in zip(row, response.mask, strict=True)]
        for response, row in zip(batch, rows, strict=True)
    ]


def returns_to_go(response: Response, gamma: float) -> list[float]:
    following, row = 0.0, [0.0] * len(response.mask)
    for t in reversed(response.generated()):
        following = response.rewards[t] + gamma * following
        row[t] = following
    return row


def reinforce_plus_plus(batch: Batch, *, gamma: float) -> Rows:
    return whitened(batch, [returns_to_go(response, gamma) for response in batch])


def reinforce_plus_plus_baseline(batch: Batch) -> Rows:
    def formula(group: list[Response]) -> list[float]:
        center = mean([response.score for response in group]) if len(group) > 1 else 0.0
        return [response.score - center for response in group]

    return whitened(batch, of_groups(batch, formula))


def gdpo(batch: Batch, weights: dict[str, float]) -> Rows:
    def formula(group: list[Response]) -> list[float]:
        sums = [0.0] * len(group)
        for name, weight in weights.items():
            values = [response.components[name] for response in group]
            center, scale = 0.0, 1.0
            if len(group) > 1:
                center, scale = mean(values), math.sqrt(unbiased_variance(values)) + 1e-6
            sums = [total + weight * (value - center) / scale for total, value in zip(sums, values, strict=True)]
        return sums

    values = per_response(batch, formula)
    center, variance = mean(values), unbiased_variance(values) if len(values) > 1 else 0.0
    whitened = [(value - center) / math.sqrt(variance + 1e-8) for value in values]
    return [response.per_token(value) for response, value in zip(batch, whitened, strict=True)]


def remax(batch: Batch) -> Rows:
    rows = []
    for response in batch:
        to_go = returns_to_go(response, 1.0)
        rows.append([value - response.greedy if m else 0.0 for value, m in zip(to_go, response.mask, strict=True)])
    return rows


def prime(batch: Batch, *, gamma: float, outcome: float, process: float) -> Rows:
    """Whitened: outcome * RLOO + process * the discounted sum of token rewards minus the mean of the other responses.

    Token rewards are divided by their largest sum from a token to the end, in absolute value, over the batch.
    """
    largest = 0.0
    for response in batch:
        total = 0.0
        for t in reversed(response.generated()):
            total += response.process[t]
            largest = max(largest, abs(total))

    def mean_process(response: Response) -> float:
        return mean([response.process[t] for t in response.generated()]) if response.length() else 0.0

    rows = [[outcome * value for value in row] for row in rloo(batch)]
    for response, row in zip(batch, rows, strict=True):
        others = [other for other in batch if other.group == response.group and other is not response]
        baseline = mean([mean_process(other) for other in others]) if others else 0.0
        following = 0.0
        for t in reversed(response.generated()):
            following = (response.process[t] - baseline) / (largest + 1e-6) + gamma * following
            row[t] += process * following
    return whitened(batch, rows)


def gae(batch: Batch, *, gamma: float, lam: float) -> tuple[Rows, Rows]:
    """(whitened advantages, returns)"""
    advantages, returns = [], []
    for response in batch:
        next_value = next_advantage = 0.0
        row, target = [0.0] * len(response.mask), [0.0] * len(response.mask)
        for t in range(len(response.mask) - 1, -1, -1):
            if not response.mask[t]:
                continue
            delta = response.rewards[t] + gamma * next_value - response.values[t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = response.values[t]
            row[t] = next_advantage
            target[t] = next_advantage + response.values[t]
        advantages.append(row)
        returns.append(target)
    return whitened(batch, advantages), returns


# --------------------------------------------------------------------------------------------------- aggregation


def token_shares(batch: Batch, mode: str, scale: float) -> Rows:
    """Return what one unit of loss at each token adds to the loss of the mini-batch."""
    tokens = sum(response.length() for response in batch)
    sequences = sum(response.length() > 0 for response in batch)
    rows = []
    for response in batch:
        n = response.length()
        if n == 0:
            share = 0.0
        elif mode == "token-mean":
            share = 1 / tokens
        elif mode == "seq-mean-token-sum":
            share = 1 / sequences
        elif mode == "seq-mean-token-mean":
            share = 1 / n / sequences
        elif mode == "seq-mean-token-sum-norm":
            share = 1 / (sequences * scale)
        else:
            raise ValueError(mode)
        rows.append(response.per_token(share))
    return rows


def aggregated(batch: Batch, values: Rows, mode: str, scale: float) -> float:
    shares = token_shares(batch, mode, scale)
    return math.fsum(shares[i][t] * values[i][t] for i, response in enumerate(batch) for t in response.generated())


# -------------------------------------------------------------------------------------------------------- losses


@dataclass(frozen=True)
class Numbers:
    """The parameters of the losses."""

    low: float = 0.2
    high: float = 0.2
    c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    cov_share: float = 0.0002
    cov_lb: float = 1.0
    cov_ub: float = 5.0
    kl_share: float = 0.0002
    kl_coef: float = 0.1
    beta: float = 0.1
    eta: float = 1.0


Slope = tuple[float, float]  # loss of a token, and its derivative by the lp of that token


def ratio(lp: float, old: float) -> Slope:
    """r = exp(clamp(d, -20, 20)), and dr/dlp."""
    d = lp - old
    r = math.exp(clip(d, -20, 20))
    return r, r if -20 <= d <= 20 else 0.0


def ppo(a: float, r: Slope, n: Numbers) -> Slope:
    """max(-A*r, -A*clip(r))"""
    free, clipped = -a * r[0], -a * clip(r[0], 1 - n.low, 1 + n.high)
    if clipped > free:
        return clipped, 0.0
    return free, -a * r[1]


def vanilla(lp: float, old: float, a: float, n: Numbers) -> Slope:
    loss, slope = ppo(a, ratio(lp, old), n)
    if a < 0 and -a * n.c < loss:
        return -a * n.c, 0.0
    return loss, slope


def cispo(lp: float, old: float, a: float, n: Numbers) -> Slope:
    weight = clip(ratio(lp, old)[0], 1 - n.low, 1 + n.high)
    return -weight * a * lp, -weight * a


def dppo(lp: float, old: float, a: float, n: Numbers, *, kl: bool) -> Slope:
    p, q = math.exp(min(lp, -1e-6)), math.exp(min(old, -1e-6))
    up = down = math.exp(lp) - math.exp(old)
    if kl:
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        up, down = (divergence, 0.0) if p > q else (0.0, -divergence)
    if (a > 0 and up > n.high) or (a < 0 and down < -n.low):
        return 0.0, 0.0
    weight = min(ratio(lp, old)[0], n.c)
    return -weight * a * lp, -weight * a


def sapo(lp: float, old: float, a: float, n: Numbers) -> Slope:
    tau = n.tau_pos if a > 0 else n.tau_neg
    r, dr = ratio(lp, old)
    gate = sigmoid(tau * (r - 1))
    gate_slope = tau * sigmoid(tau * (r - 1)) * sigmoid(-tau * (r - 1)) * dr
    return -a * gate * 4 / tau, -a * gate_slope * 4 / tau


def plain_gradient(lp: float, old: float, a: float, n: Numbers) -> Slope:
    return -a * lp, -a


TOKEN_LOSSES = {
    "vanilla": vanilla,
    "cispo": cispo,
    "dppo_tv": partial(dppo, kl=False),
    "dppo_kl": partial(dppo, kl=True),
    "sapo": sapo,
    "gpg": plain_gradient,
}


def token_losses(batch: Batch, name: str, n: Numbers) -> tuple[Rows, Rows]:
    """Return the loss of each token and its derivative by that token's lp, for losses of single tokens."""
    formula = TOKEN_LOSSES[name]
    return _split(
        [
            [formula(x.lp[t], x.old[t], x.advantages[t], n) if m else (0.0, 0.0) for t, m in enumerate(x.mask)]
            for x in batch
        ]
    )


def off_policy(batch: Batch, threshold: float) -> list[list[bool]]:
    """Return the tokens with A < 0 of responses whose mean of (roll - lp) is above the threshold."""
    rows = []
    for x in batch:
        lags = [x.roll[t] - x.lp[t] for t in x.generated()]
        late = bool(lags) and mean(lags) > threshold
        rows.append([late and bool(m) and a < 0 for m, a in zip(x.mask, x.advantages, strict=True)])
    return rows


def gspo(batch: Batch, n: Numbers) -> tuple[Rows, Rows]:
    """The sequence's ratio at each token, with the derivative by that token's lp only."""
    rows = []
    for x in batch:
        row = [(0.0, 0.0)] * len(x.mask)
        for t in x.generated():
            mean_d = mean([x.lp[u] - x.old[u] for u in x.generated()])
            s = math.exp(min(mean_d, 10.0))
            row[t] = ppo(x.advantages[t], (s, s if mean_d <= 10 else 0.0), n)
        rows.append(row)
    return _split(rows)


def covariances(batch: Batch) -> Rows:
    """(A - mean A)(lp - mean lp), with means over the generated tokens of the whole mini-batch."""
    seen = [(x.advantages[t], x.lp[t]) for x in batch for t in x.generated()]
    if not seen:
        return [[0.0] * len(x.mask) for x in batch]
    mean_a, mean_lp = mean([a for a, _ in seen]), mean([lp for _, lp in seen])
    return [
        [(x.advantages[t] - mean_a) * (x.lp[t] - mean_lp) if m else 0.0 for t, m in enumerate(x.mask)] for x in batch
    ]


def clip_cov_choice(batch: Batch, n: Numbers) -> list[list[bool]]:
    """Choose among unclipped tokens with a covariance in (lb, ub), so that they are `cov_share` of all tokens."""
    cov, eligible = covariances(batch), []
    for i, x in enumerate(batch):
        for t in x.generated():
            a, r = x.advantages[t], ratio(x.lp[t], x.old[t])[0]
            already = ppo(a, (r, 0.0), n)[0] != -a * r
            if n.cov_lb < cov[i][t] < n.cov_ub and not already:
                eligible.append((i, t))
    chosen = [[False] * len(x.mask) for x in batch]
    if eligible:
        share = n.cov_share * sum(x.length() for x in batch) / len(eligible)
        for i, t in eligible:
            chosen[i][t] = batch[i].noise[t] < share
    return chosen


def kl_cov_choice(batch: Batch, n: Numbers) -> list[list[bool]]:
    """Choose the `kl_share` of all tokens with the largest covariance, at least one; ties by noise."""
    cov = covariances(batch)
    ranked = sorted((-cov[i][t], x.noise[t], i, t) for i, x in enumerate(batch) for t in x.generated())
    chosen = [[False] * len(x.mask) for x in batch]
    for _, _, i, t in ranked[: max(1, int(n.kl_share * len(ranked)))]:
        chosen[i][t] = True
    return chosen


def clip_cov(batch: Batch, n: Numbers) -> tuple[Rows, Rows]:
    """PPO without dual clip, and without the gradient of the chosen tokens."""
    rows = []
    for x in batch:
        row = [(0.0, 0.0)] * len(x.mask)
        for t in x.generated():
            loss, slope = ppo(x.advantages[t], ratio(x.lp[t], x.old[t]), n)
            row[t] = loss, 0.0 if x.chosen[t] else slope
        rows.append(row)
    return _split(rows)


def kl_cov(batch: Batch, n: Numbers) -> tuple[Rows, Rows]:
    """-A*r everywhere, + coef*|d| on the chosen tokens."""
    rows = []
    for x in batch:
        row = [(0.0, 0.0)] * len(x.mask)
        for t in x.generated():
            r, dr = ratio(x.lp[t], x.old[t])
            loss, slope = -x.advantages[t] * r, -x.advantages[t] * dr
            if x.chosen[t]:
                d = x.lp[t] - x.old[t]
                loss, slope = loss + n.kl_coef * abs(d), slope + n.kl_coef * sign(d)
            row[t] = loss, slope
        rows.append(row)
    return _split(rows)


def geo_mean(batch: Batch, n: Numbers) -> tuple[list[float], Rows]:
    """Loss of each sequence, and its derivative by the lp of each of its tokens."""
    losses, slopes = [], []
    for x in batch:
        loss, row = 0.0, [0.0] * len(x.mask)
        if x.length():
            a = mean([x.advantages[t] for t in x.generated()])
            clipped = []
            for t in x.generated():
                d = x.lp[t] - x.old[t]
                clipped.append(min(d, n.high) if a > 0 else max(d, -n.low))
            mean_d = mean(clipped)
            r = math.exp(clip(mean_d, -20, 20))
            loss = -a * r
            for t, d in zip(x.generated(), clipped, strict=True):
                moves = d == x.lp[t] - x.old[t] and -20 <= mean_d <= 20
                row[t] = -a * r / x.length() if moves else 0.0
        losses.append(loss)
        slopes.append(row)
    return losses, slopes


def sppo(batch: Batch, n: Numbers) -> tuple[list[float], Rows]:
    """(sum(lp - lp_old) - eta*A)^2 of each sequence, A being one number per sequence."""
    losses, slopes = [], []
    for x in batch:
        if not x.length():
            losses.append(0.0)
            slopes.append([0.0] * len(x.mask))
            continue
        a = mean([x.advantages[t] for t in x.generated()])
        miss = math.fsum(x.lp[t] - x.old[t] for t in x.generated()) - n.eta * a
        losses.append(miss**2)
        slopes.append(x.per_token(2 * miss))
    return losses, slopes


def dpo_pairs(group: Sequence[Response]) -> list[tuple[Response, Response]]:
    """(better, worse): the best with the worst, the second best with the second worst, while their scores differ.

    Ties are broken by the order of the episodes; responses without generated tokens are not paired.
    """
    scored = sorted((x for x in group if x.length()), key=lambda x: x.order)
    falling = sorted(scored, key=lambda x: -x.score)
    rising = sorted(scored, key=lambda x: x.score)
    return [(falling[k], rising[k]) for k in range(len(scored) // 2) if falling[k].score > rising[k].score]


def dpo(batch: Batch, n: Numbers) -> tuple[float, Rows]:
    """Mean over pairs of -log sigmoid(margin), and its derivative by every lp."""
    slopes = {id(x): [0.0] * len(x.mask) for x in batch}
    losses, moves = [], []
    for group in by_group(batch):
        for better, worse in dpo_pairs(group):
            gains = [math.fsum(x.lp[t] - x.ref[t] for t in x.generated()) for x in (better, worse)]
            margin = n.beta * (gains[0] - gains[1])
            losses.append(-log_sigmoid(margin))
            moves.append((better, worse, n.beta * sigmoid(-margin)))
    for better, worse, move in moves:
        for t in better.generated():
            slopes[id(better)][t] -= move / len(moves)
        for t in worse.generated():
            slopes[id(worse)][t] += move / len(moves)
    return (mean(losses) if losses else 0.0), [slopes[id(x)] for x in batch]


def value_loss(v: float, old: float, target: float, eps: float) -> Slope:
    """0.5 * max((v-R)^2, (clip(v, v_old-eps, v_old+eps)-R)^2), and its derivative by v."""
    clipped = clip(v, old - eps, old + eps)
    if (clipped - target) ** 2 > (v - target) ** 2:
        return 0.5 * (clipped - target) ** 2, 0.0
    return 0.5 * (v - target) ** 2, v - target


def outcome_loss(batch: Batch, beta: float) -> tuple[float, Rows]:
    """Binary cross-entropy of each score (0 to 1) with sigmoid(beta * sum(lp - lp_ref)), averaged over responses with
    generated tokens, and its derivative by every lp."""
    responses = [x for x in batch if x.length()]
    losses, slopes = [], []
    for x in batch:
        logit = beta * math.fsum(x.lp[t] - x.ref[t] for t in x.generated())
        right, wrong = log_sigmoid(logit), log_sigmoid(-logit)
        losses.append(-(x.score * right + (1 - x.score) * wrong) if x.length() else 0.0)
        slopes.append(x.per_token(beta * (sigmoid(logit) - x.score) / max(1, len(responses))))
    return math.fsum(losses) / max(1, len(responses)), slopes


def clip_fractions(batch: Batch, n: Numbers) -> dict[str, float]:
    """Return the share of generated tokens at each clip of `vanilla`, and mean(-d)."""
    upper = lower = dual = 0
    gaps = []
    for x in batch:
        for t in x.generated():
            a, r = x.advantages[t], ratio(x.lp[t], x.old[t])[0]
            upper += a > 0 and r > 1 + n.high
            lower += a < 0 and r < 1 - n.low
            dual += a < 0 and r > n.c
            gaps.append(x.old[t] - x.lp[t])
    tokens = max(1, len(gaps))
    return {"upper": upper / tokens, "lower": lower / tokens, "dual": dual / tokens, "kl": math.fsum(gaps) / tokens}


def _split(rows: list[list[Slope]]) -> tuple[Rows, Rows]:
    return [[loss for loss, _ in row] for row in rows], [[slope for _, slope in row] for row in rows]


# ------------------------------------------------------------------------------------------------------------ KL


def kl(lp: float, ref: float, name: str) -> Slope:
    """Return the KL estimate of a token and its derivative by lp; with a trailing + the derivative of k2."""
    x = ref - lp
    form = name.removesuffix("+")
    if form in ("kl", "k1"):
        results = -x, 1.0
    elif form == "abs":
        results = abs(x), -sign(x)
    elif form in ("mse", "k2"):
        results = x * x / 2, -x
    elif form in ("low_var_kl", "k3"):
        near = clip(x, -20, 20)
        value = math.exp(near) - near - 1
        moves = near == x and -10 <= value <= 10
        results = clip(value, -10, 10), 1 - math.exp(near) if moves else 0.0
    else:
        raise ValueError(name)
    return (results[0], -x) if name.endswith("+") else results


def exact_kl(current: list[float], other: list[float], floor: float = -math.inf) -> tuple[float, list[float]]:
    """sum_v p(v) * (log p(v) - log q(v)) of two rows of logits, and its derivative by each logit of p.

    Log-probs below the floor count as the floor, in sg[log p(v) - log q(v)]: p(v) is as it is.
    """
    logs = []
    for row in (current, other):
        largest = max(row)
        total = math.fsum(math.exp(x - largest) for x in row)
        logs.append([x - largest - math.log(total) for x in row])
    gaps = [max(a, floor) - max(b, floor) for a, b in zip(*logs, strict=True)]
    kl = math.fsum(math.exp(a) * gap for a, gap in zip(logs[0], gaps, strict=True))
    return kl, [math.exp(a) * (gap - kl) for a, gap in zip(logs[0], gaps, strict=True)]


def forward_kl(current: list[float], other: list[float], topk: int, floor: float) -> tuple[float, list[float]]:
    """Return sum of q (max(log q, floor) - max(log p, floor)) over the `topk` largest q, and its gradient."""
    log_p, log_q = (
        [value - max(row) - math.log(math.fsum(math.exp(each - max(row)) for each in row)) for value in row]
        for row in (current, other)
    )
    kept = sorted(range(len(other)), key=lambda v: -other[v])[:topk]
    value = math.fsum(math.exp(log_q[v]) * (max(log_q[v], floor) - max(log_p[v], floor)) for v in kept)
    gradient = [0.0] * len(current)
    for v in kept:
        if log_p[v] > floor:  # d log p(v) / d logit(w) = [v = w] - p(w)
            for w in range(len(current)):
                gradient[w] -= math.exp(log_q[v]) * ((v == w) - math.exp(log_p[w]))
    return value, gradient


def over_kept(
    current: list[float], other: list[float], kept: list[int], target: int
) -> tuple[tuple[float, float, float], list[float]]:
    """Return log-prob of the target, entropy and KL over the kept tokens alone, and the gradient of their sum."""
    ids = sorted(set(kept))
    largest = max(current[v] for v in ids)
    total = math.fsum(math.exp(current[v] - largest) for v in ids)
    logs = {v: current[v] - largest - math.log(total) for v in ids}
    entropy = -math.fsum(math.exp(log_p) * log_p for log_p in logs.values())
    kl, slopes = exact_kl([current[v] for v in ids], [other[v] for v in ids])
    gradient = [0.0] * len(current)
    for v, slope in zip(ids, slopes, strict=True):
        p = math.exp(logs[v])
        gradient[v] = (v == target) - p - p * (logs[v] + entropy) + slope
    return (logs[target], entropy, kl), gradient


def next_beta(beta: float, kl: float, target: float, horizon: float, n_steps: int) -> float:
    return beta * (1 + clip(kl / target - 1, -0.2, 0.2) * n_steps / horizon)


# -------------------------------------------------------------------------------------------- rollout correction


def log_ratios(x: Response) -> list[float]:
    """D = lp_old - lp_roll, clamped to +-20, of the generated tokens."""
    return [clip(x.old[t] - x.roll[t], -20, 20) for t in x.generated()]


def log_statistics(x: Response, level: str) -> list[float]:
    """Return D at each token, or its sum or mean over the sequence."""
    results = log_ratios(x)
    row = [0.0] * len(x.mask)
    for t, current in zip(x.generated(), results, strict=True):
        row[t] = {"token": current, "sequence": math.fsum(results), "geometric": mean(results)}[level]
    return row


def importance_weights(batch: Batch, level: str, threshold: float, normalize: bool) -> Rows:
    rows = []
    for x in batch:
        logs = log_statistics(x, level)
        # Clamp before exp: the sum over a long sequence would overflow.
        rows.append(
            [math.exp(min(log, math.log(threshold))) if m else 0.0 for log, m in zip(logs, x.mask, strict=True)]
        )
    seen = [rows[i][t] for i, x in enumerate(batch) for t in x.generated()]
    if level == "sequence":  # every sequence counts once
        seen = [rows[i][x.generated()[0]] for i, x in enumerate(batch) if x.length()]
    if normalize and seen:
        rows = [[weight / mean(seen) for weight in row] for row in rows]
    return rows


def icepop_weights(batch: Batch, lower: float, upper: float) -> Rows:
    """exp(D) of a token, and 0 outside the bounds."""
    rows = []
    for x in batch:
        row = [0.0] * len(x.mask)
        for t, d in zip(x.generated(), log_ratios(x), strict=True):
            row[t] = math.exp(d) if lower <= math.exp(d) <= upper else 0.0
        rows.append(row)
    return rows


def rejection_by_kl(batch: Batch, level: str, upper: float) -> list[list[bool]]:
    """Keep k2 = D^2/2 or k3 = exp(D) - 1 - D up to a bound: of the token, or the sequence's sum, mean or maximum."""
    rows = []
    for x in batch:
        row = [False] * len(x.mask)
        estimates = [d * d / 2 if level.endswith("k2") else math.exp(d) - 1 - d for d in log_ratios(x)]
        for t, own in zip(x.generated(), estimates, strict=True):
            kind = level.removesuffix("_k2").removesuffix("_k3")
            whole = {"seq_sum": sum(estimates), "seq_mean": mean(estimates), "seq_max": max(estimates)}
            row[t] = whole.get(kind, own) <= upper
        rows.append(row)
    return rows


def rejection_mask(batch: Batch, level: str, lower: float, upper: float) -> list[list[bool]]:
    if level.endswith(("_k2", "_k3")):
        return rejection_by_kl(batch, level, upper)
    rows = []
    for x in batch:
        logs = log_statistics(x, level)
        inside = [math.log(lower) <= log <= math.log(upper) for log in logs]
        rows.append([bool(m) and fits for m, fits in zip(x.mask, inside, strict=True)])
    return rows


@dataclass(frozen=True)
class Mismatch:
    diff_mean: float
    diff_max: float
    pearson: float
    ess: float


def mismatch(batch: Batch) -> Mismatch:
    """|p_old - p_roll|, their correlation, and the effective share of samples (sum w)^2 / (n * sum w^2), w = exp(D)."""
    p = [math.exp(x.old[t]) for x in batch for t in x.generated()]
    q = [math.exp(x.roll[t]) for x in batch for t in x.generated()]
    w = [math.exp(d) for x in batch for d in log_ratios(x)]
    diff = [abs(a - b) for a, b in zip(p, q, strict=True)]
    mean_p, mean_q = mean(p), mean(q)
    together = math.fsum((a - mean_p) * (b - mean_q) for a, b in zip(p, q, strict=True))
    spread = math.sqrt(math.fsum((a - mean_p) ** 2 for a in p) * math.fsum((b - mean_q) ** 2 for b in q))
    return Mismatch(
        diff_mean=mean(diff),
        diff_max=max(diff),
        pearson=together / spread if spread else math.nan,
        ess=math.fsum(w) ** 2 / (len(w) * math.fsum(v * v for v in w)),
    )


# ------------------------------------------------------------------------------------------------------- rewards


def compute_overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """0 up to the last `buffer` tokens, then `factor / buffer` per token, up to `factor`."""
    penalty = 0.0
    for _ in range(max_length - buffer, min(length, max_length)):
        penalty -= factor / buffer
    return penalty
