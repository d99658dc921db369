"""Check that every estimator with every loss that it is meant for finds the best arm of bandits with a known optimum.

make show-bandits [ARGS=--short]

A policy is a table of logits, and a response is a sequence of one or two arms. Everything between the scores and the
gradient is the code that trains models: estimator, prepass, loss, aggregation. A critic and PRIME's reward model are
tables as well. Every estimator and every loss also runs with a deliberate mistake (the sign of the advantages, the
policy that ratios are relative to, the mask), which must keep it from the optimum.
"""

import argparse
import itertools
from dataclasses import dataclass, replace

import torch
from _common import finish
from torch import Tensor

from verl.algorithms.advantages import ESTIMATORS, AdvantageInputs
from verl.algorithms.aggregate import count_totals
from verl.algorithms.losses import LOSSES, LossOptions
from verl.algorithms.objective import (
    ModelOutput,
    OutcomeObjective,
    PolicyObjective,
    ValueObjective,
    ValueOutput,
    make_loss_inputs,
)
from verl.algorithms.prepass import PREPASSES
from verl.algorithms.settings import AlgorithmSettings, Distillation, EstimatorOptions
from verl.data.flat_batch import FlatBatch
from verl.training.kernels.logprobs import LastLayer, vocabulary_kl

LIMIT = 0.9
GROUPS = 8
STEPS = 100
NOISE = 0.05  # of a score
TOP_K = 3  # of ten arms, and of three
OPTIONS = LossOptions(clip_cov_ratio=0.05, clip_cov_lb=0.1, clip_cov_ub=5.0, kl_cov_ratio=0.02)

PREFERENCE = ("sppo", "dpo")
OTHERS = ("win_rate", "no_rewards")  # for preference losses alone; for a teacher without rewards
PER_TOKEN = (
    "gae",
    "reinforce_plus_plus",
    "prime",
    "optimal_token_baseline",
    "gigpo",
)  # advantages differ within a response
ONE_RATIO = ("gspo", "geo_mean")  # one ratio per response: for advantages that do not differ within it
TRUNCATED = "vanilla, top_k"  # the policy samples from the likely arms, and trains with log-probs over them
MASKED = "vanilla, masked"  # without responses that the first update of a step has made unlikely
ANCHORED = (
    "vanilla",
    TRUNCATED,
    MASKED,
    "gspo",
    "geo_mean",
    "clip_cov",
    "sppo",
)  # the ratio to the old policy limits an update
TEACHERS = {  # losses that follow a teacher, which prefers the best path
    "teacher, full": {},
    "teacher, forward_kl": {"is_forward": True},
    "teacher, forward_kl_topk": {"is_forward": True, "topk": 2},
}
MISTAKES = ("sign", "anchor", "mask")


@dataclass(frozen=True)
class Bandit:
    """Scores by path, one arm per step. A token that the policy did not generate comes between two steps."""

    rewards: Tensor  # [arms] or [arms, arms]

    @property
    def arms(self) -> int:
        return len(self.rewards)

    @property
    def steps(self) -> int:
        return self.rewards.dim()

    @property
    def states(self) -> int:
        return 1 if self.steps == 1 else 1 + self.arms

    @property
    def best(self) -> tuple[int, ...]:
        return tuple(int(index) for index in torch.unravel_index(self.rewards.argmax(), self.rewards.shape))


BANDITS = {
    "arms": Bandit(torch.tensor([0.1, 0.2, 0.3, 0.0, 0.4, 0.2, 1.0, 0.1, 0.3, 0.5]).double()),
    # The first arm of the best path has the worst mean: the second step must be credited for its own choice.
    "steps": Bandit(torch.tensor([[0.5, 0.5, 0.4], [0.0, 1.0, 0.0], [0.4, 0.6, 0.5]]).double()),
}


class Run:
    """A policy that learns one bandit."""

    def __init__(self, bandit: Bandit, estimator: str, loss: str, mistake: str | None, seed: int = 0) -> None:
        self.bandit, self.estimator, self.loss, self.mistake = bandit, estimator, loss, mistake
        self.generator = torch.Generator().manual_seed(seed)
        shape = (bandit.states, bandit.arms)
        self.kept = torch.ones(shape, dtype=torch.bool)
        self.logits = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        self.values = torch.zeros(bandit.states, dtype=torch.float64, requires_grad=True)
        self.process = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits], lr=0.1)
        self.others = torch.optim.Adam([self.values, self.process], lr=0.1)
        self.samples = 2 if estimator == "grpo_passk" else 4  # with more, a group with two best ones has no signal
        options = EstimatorOptions(by_std=estimator not in ("dr_grpo", "grpo_passk"))
        self.options = options
        loss_options = replace(OPTIONS, off_policy_mask_threshold=0.05) if loss == MASKED else OPTIONS
        algorithm = AlgorithmSettings(loss_mode=loss.split(",")[0], loss_options=loss_options)
        if loss in TEACHERS:
            algorithm = AlgorithmSettings(distillation=Distillation("loss"))
        self.objective = PolicyObjective(algorithm)
        self.teacher, state = torch.zeros(shape, dtype=torch.float64), 0
        for arm in bandit.best:
            self.teacher[state, arm] = -8.0 if mistake == "sign" else 8.0
            state = 1 + arm

    def learn(self) -> float:
        """Return the probability of the best path after training."""
        for _ in range(STEPS):
            self.step()
        probability, state = 1.0, 0
        for arm in self.bandit.best:
            probability *= float(self.logits[state].softmax(-1)[arm].detach())
            state = 1 + arm
        return probability

    def step(self) -> None:
        paths = self.sample()
        scores = self.score(paths) + NOISE * torch.randn(len(paths), generator=self.generator, dtype=torch.float64)
        batch, states, arms = self.layout(paths)
        old = self.logprobs(self.logits, states, arms)
        batch = batch.with_(rollout_logprobs=old.detach())
        if self.mistake == "anchor":
            old = self.logprobs(torch.zeros_like(self.logits), states, arms)
        batch = batch.with_(old_logprobs=old.detach(), ref_logprobs=torch.log(torch.ones_like(old) / self.bandit.arms))
        inputs = self.inputs(batch, scores, states, arms)
        estimate = ESTIMATORS["grpo" if self.estimator == "dr_grpo" else self.estimator](inputs)
        advantages, returns = estimate if isinstance(estimate, tuple) else (estimate, None)
        if self.mistake == "sign":
            advantages, inputs = -advantages, replace(inputs, scores=-inputs.scores)
        batch = batch.with_(advantages=advantages, returns=returns, values=inputs.values)
        for _ in range(2):  # the second update starts from another policy than the one that sampled
            self.update(batch, inputs, states, arms)
        self.update_others(batch, scores, states, arms)

    def sample(self) -> Tensor:
        """Return paths [B, steps]."""
        if self.loss == TRUNCATED:  # with ties at the limit
            self.kept = self.logits.detach() >= self.logits.detach().topk(TOP_K).values[:, -1:]
        states = torch.zeros(GROUPS * self.samples, dtype=torch.int64)
        arms: list[Tensor] = []
        for _ in range(self.bandit.steps):
            probabilities = self.logprobs_of_arms(self.logits.detach()).exp()[states]
            arms.append(torch.multinomial(probabilities, 1, generator=self.generator).squeeze(1))
            states = 1 + arms[-1]
        return torch.stack(arms, 1)

    def score(self, paths: Tensor) -> Tensor:
        return self.bandit.rewards[tuple(paths.unbind(1))]

    def layout(self, paths: Tensor) -> tuple[FlatBatch, Tensor, Tensor]:
        """Return the responses as a batch, and the state and the arm of each token: [T] each.

        A response is a token of the prompt, then arms with a token of the environment between them.
        """
        count, steps = paths.shape
        length = 2 * steps
        mask = torch.zeros(count, length, dtype=torch.bool)
        states, arms = torch.zeros(count, length, dtype=torch.int64), torch.zeros(count, length, dtype=torch.int64)
        for step in range(steps):
            mask[:, 2 * step + 1] = True
            arms[:, 2 * step + 1] = paths[:, step]
            states[:, 2 * step + 1] = 1 + paths[:, step - 1] if step else 0
        if self.mistake == "mask":
            mask = mask.roll(1, 1)
        offsets = torch.arange(0, count * length + 1, length)
        batch = FlatBatch(tokens=arms.flatten(), offsets=offsets, mask=mask.flatten())
        return batch, states.flatten(), arms.flatten()

    def logprobs(self, logits: Tensor, states: Tensor, arms: Tensor) -> Tensor:
        return self.logprobs_of_arms(logits)[states, arms]

    def logprobs_of_arms(self, logits: Tensor) -> Tensor:
        return logits.where(self.kept, -1e15).log_softmax(-1)

    def inputs(self, batch: FlatBatch, scores: Tensor, states: Tensor, arms: Tensor) -> AdvantageInputs:
        greedy = Run.greedy_path(self.logits.detach(), self.bandit)
        last = batch.mask * torch.arange(len(batch.mask))
        rewards = torch.zeros(len(batch.mask), dtype=torch.float64)
        rewards[torch.stack([part.max() for part in last.split(batch.lengths.tolist())])] = scores
        process = 0.5 * (self.process.detach().log_softmax(-1)[states, arms] - batch.ref_logprobs) * batch.mask
        return AdvantageInputs(
            scores=scores,
            groups=torch.arange(GROUPS).repeat_interleave(self.samples),
            mask=batch.mask,
            offsets=batch.offsets,
            rewards=rewards,
            values=self.values.detach()[states],
            baselines=self.score(greedy[None]).expand(len(scores)),
            process=process,
            logprobs=batch.old_logprobs,
            sum_pi_squared=self.logprobs_of_arms(self.logits.detach()).exp().square().sum(-1)[states],
            components=split_score(scores),
            turns=self.list_turns(states),
            options=self.options,
        )

    def list_turns(self, states: Tensor) -> Tensor:
        """Return position, index, reward and state of every step: [n, 4]."""
        at = torch.arange(1, len(states), 2)
        return torch.stack([at, (at // 2) % self.bandit.steps, torch.zeros_like(at), states[at]], 1).double()

    @staticmethod
    def greedy_path(logits: Tensor, bandit: Bandit) -> Tensor:
        path, state = [], 0
        for _ in range(bandit.steps):
            path.append(int(logits[state].argmax()))
            state = 1 + path[-1]
        return torch.tensor(path)

    def update(self, batch: FlatBatch, inputs: AdvantageInputs, states: Tensor, arms: Tensor) -> None:
        logprobs = self.logprobs(self.logits, states, arms)
        if (prepass := PREPASSES.get(self.loss)) is not None:
            noise = torch.rand(len(arms), generator=self.generator, dtype=torch.float64)
            batch = batch.with_(**prepass(make_loss_inputs(logprobs.detach(), batch), inputs, noise, OPTIONS).fields)
        output = ModelOutput(logprobs, torch.zeros_like(logprobs))
        if self.loss in TEACHERS:
            unit = torch.eye(self.bandit.arms, dtype=torch.float64)
            teacher = LastLayer(self.teacher[states], unit, **TEACHERS[self.loss])
            output = output._replace(teacher_kl=vocabulary_kl(LastLayer(self.logits[states], unit), teacher))
        loss, _ = self.objective(output, batch, count_totals(batch.mask, batch.offsets))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def update_others(self, batch: FlatBatch, scores: Tensor, states: Tensor, arms: Tensor) -> None:
        """Train the critic and the process reward model."""
        totals = count_totals(batch.mask, batch.offsets)
        self.others.zero_grad()
        if batch.returns is not None:
            ValueObjective()(ValueOutput(self.values[states]), batch, totals)[0].backward()
        if self.estimator == "prime":
            outcomes = scores.clamp(0.0, 1.0).repeat_interleave(batch.lengths)
            batch = batch.with_(advantages=outcomes, old_logprobs=batch.ref_logprobs)
            output = ModelOutput(self.process.log_softmax(-1)[states, arms], torch.zeros(len(arms)))
            OutcomeObjective(0.5)(output, batch, totals)[0].backward()
        self.others.step()


def split_score(scores: Tensor) -> dict[str, Tensor]:
    """Return two components of a score: its value, and 100 times whether it is high."""
    return {"value": scores, "high": 100.0 * (scores > 0.45).double()}


def pairs() -> list[tuple[str, str]]:
    """Return every estimator with the losses that it is meant for."""
    distinct = {function: name for name, function in reversed(ESTIMATORS.items())}.values()
    estimators = ["dr_grpo", *(name for name in reversed(distinct) if name not in OTHERS)]
    losses = [*(name for name in LOSSES if name not in PREFERENCE), MASKED, TRUNCATED]
    fitting = (
        (estimator, loss)
        for estimator, loss in itertools.product(estimators, losses)
        if not (estimator in PER_TOKEN and loss in ONE_RATIO)
    )
    return [*fitting, *(("win_rate", loss) for loss in PREFERENCE), *(("no_rewards", loss) for loss in TEACHERS)]


def is_representative(estimator: str, loss: str) -> bool:
    """Whether a pair is the one by which its estimator or its loss is known."""
    return loss == "vanilla" or estimator in ("grpo", *OTHERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="each estimator and each loss once")
    options = parser.parse_args()
    right = [pair for pair in pairs() if is_representative(*pair) or not options.short]
    worst, best_mistake, wrong = 1.0, 0.0, []
    for (estimator, loss), (name, bandit) in itertools.product(right, BANDITS.items()):
        probability = Run(bandit, estimator, loss, None).learn()
        worst = min(worst, probability)
        if probability < LIMIT:
            wrong.append(f"{estimator} with {loss} on {name}: {probability:.3f}")
            print(wrong[-1], flush=True)
    mistakes = 0
    for (estimator, loss), mistake in itertools.product(pairs(), MISTAKES):
        if not is_representative(estimator, loss) or (mistake == "anchor" and loss not in ANCHORED):
            continue
        bandit = BANDITS["steps" if mistake == "mask" else "arms"]
        probability = Run(bandit, estimator, loss, mistake).learn()
        best_mistake, mistakes = max(best_mistake, probability), mistakes + 1
        if probability >= LIMIT:
            wrong.append(f"{estimator} with {loss} and a wrong {mistake} still learns: {probability:.3f}")
            print(wrong[-1], flush=True)
    finish(
        "bandits",
        not wrong,
        pairs=len(right),
        runs=len(right) * len(BANDITS),
        worst=round(worst, 3),
        mistakes=mistakes,
        best_mistake=round(best_mistake, 3),
        wrong=wrong,
    )


if __name__ == "__main__":
    main()
