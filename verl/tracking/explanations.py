"""What the numbers of a run mean: labels on a terminal, and metrics. `verl explain` and docs/tracking.md print it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Explanation:
    """A label or a group of metrics, what it means, and which values are usual or what to do.

    Parts of metrics in angle brackets vary: `val/<data source>/mean@<n>`.
    """

    label: str  # on a terminal; "" if it is not shown there
    metrics: tuple[str, ...]
    meaning: str
    usual: str = ""

    def is_about(self, name: str) -> bool:
        """Return whether `name` is the label or one of the metrics."""
        return name.casefold() == self.label or any(_to_pattern(metric).fullmatch(name) for metric in self.metrics)


EXPLANATIONS = (
    Explanation(
        "step",
        (),
        "The current step of all steps; one step generates responses and updates the model with them.",
        "The bar beside it shows the steps that are done.",
    ),
    Explanation(
        "reward",
        ("reward/mean",),
        "Mean reward of the responses of the step.",
        "It rises over tens of steps, not at every step; if it does not, look at responses and their scores.",
    ),
    Explanation("", ("reward/min", "reward/max", "reward/std"), "The spread of the rewards of the step."),
    Explanation(
        "",
        ("reward/groups_without_signal",),
        "Share of prompts whose responses all got the same reward.",
        "Nothing is learned from these prompts; above 0.9, choose prompts that the model solves sometimes.",
    ),
    Explanation(
        "validation",
        ("val/<data source>/mean@<n>", "val/loss"),
        "Mean score of the validation responses, over the data sources; in supervised fine-tuning, the loss.",
        "If it falls while the reward rises, the reward function is probably exploited.",
    ),
    Explanation(
        "",
        ("val/<data source>/<metric>",),
        "Other metrics of a validation, e.g. `val/addition/pass@4`.",
    ),
    Explanation(
        "kl",
        ("actor/kl_loss", "actor/reward_kl", "actor/ppo_kl"),
        "KL divergence of the policy: from the reference, as a term of the loss or of the reward; without a reference, "
        "`actor/ppo_kl`, from the policy before the update.",
        "Near 0 at the start; a fast rise means that the policy changes too fast: lower the learning rate.",
    ),
    Explanation("", ("actor/kl",), "KL divergence from the reference, mean over tokens."),
    Explanation(
        "teacher kl",
        ("actor/distillation_kl",),
        "KL divergence from the teacher, mean over tokens.",
        "It falls as the policy learns from the teacher.",
    ),
    Explanation(
        "",
        ("actor/distillation_clipfrac",),
        "Share of tokens whose KL divergence from the teacher is beyond `distillation.loss_max_clamp`.",
    ),
    Explanation(
        "entropy",
        ("actor/entropy",),
        "Entropy of the policy, mean over generated tokens.",
        "It falls slowly; near 0 all responses to a prompt are alike, and nothing more is learned.",
    ),
    Explanation(
        "clipped",
        ("actor/pg_clipfrac",),
        "Share of tokens whose probability ratio is clipped by the policy loss.",
        "Usually below 0.2; 0 if a step has a single update.",
    ),
    Explanation(
        "grad norm",
        ("actor/grad_norm", "train/grad_norm"),
        "Norm of the gradient before it is clipped.",
        "Single peaks are clipped; if it keeps rising, lower the learning rate.",
    ),
    Explanation(
        "",
        ("actor/skipped_steps", "train/skipped_steps"),
        "Updates that were skipped, because the gradient was not finite or there was nothing to train on.",
        "Usually 0.",
    ),
    Explanation("loss", ("train/loss",), "Loss of supervised fine-tuning, mean over trained tokens.", "It falls."),
    Explanation("lr", ("train/lr",), "Learning rate of the step.", "It follows the schedule in `optim`."),
    Explanation(
        "value loss",
        ("critic/vf_loss",),
        "Loss of the critic's values.",
        "It falls during the first steps.",
    ),
    Explanation(
        "process accuracy",
        ("process/accuracy",),
        "Share of responses whose outcome the implicit process reward model predicts.",
        "Above 0.5, and rising.",
    ),
    Explanation(
        "",
        ("critic/score/<statistic>", "critic/rewards/<statistic>"),
        "Scores of the trained responses, and their rewards after the KL penalty.",
    ),
    Explanation(
        "",
        ("critic/advantages/<statistic>", "critic/returns/<statistic>"),
        "Advantages of the generated tokens, and with a critic their returns.",
    ),
    Explanation(
        "dropped",
        ("sampling/groups_dropped",),
        "Prompts that dynamic sampling has replaced, because all their responses got the same reward.",
        "If there are many more than trained prompts, choose prompts that the model solves sometimes.",
    ),
    Explanation(
        "tokens",
        ("response_length/mean",),
        "Generated tokens of a response, on average.",
        "A rise without more reward is wordiness; a fall to a few tokens is a collapse.",
    ),
    Explanation(
        "truncated",
        ("response_length/clip_ratio",),
        "Share of responses truncated by the length limit.",
        "Usually below 10%; above, increase `data.max_response_length`.",
    ),
    Explanation(
        "",
        ("response/empty_ratio", "response/repetitive_ratio"),
        "Share of responses that consist of their end token, and of those of which more than half repeats itself (from "
        "64 tokens on).",
        "Near 0; otherwise the model, its chat template or the reward is broken.",
    ),
    Explanation(
        "",
        ("reward/error_rate", "reward/timeout_rate"),
        "Share of responses that the reward function failed to score, or did not score in time; they are dropped.",
        "Usually 0; above `reward.max_failure_rate` the run stops.",
    ),
    Explanation(
        "staleness",
        ("training/staleness",),
        "Versions of the weights that the oldest response of the step lags behind.",
        "0 without asynchronous training, and at most `trainer.max_staleness`.",
    ),
    Explanation(
        "",
        ("training/rollout_probs_diff_mean",),
        "Absolute difference between the probabilities of the trainer and the engine, of the sampled tokens.",
        "Below 0.005; above 0.01 the run says what to try.",
    ),
    Explanation("generate", ("timing_s/gen",), "Seconds in which the step waited for responses."),
    Explanation(
        "train",
        ("timing_s/prepare", "timing_s/update"),
        "Seconds of log-probs and advantages, and of the update.",
    ),
    Explanation("sync", ("timing_s/sync",), "Seconds in which the engines got the new weights."),
    Explanation("total", ("timing_s/step",), "Seconds of the whole step."),
    Explanation(
        "tokens/s",
        ("perf/throughput",),
        "Tokens of prompts and responses per second of the whole step.",
        "It depends on model and devices; `verl plan` estimates the time of a step.",
    ),
    Explanation("", ("perf/throughput_per_device",), "The same, per device of the train workers."),
    Explanation(
        "",
        ("perf/tokens_per_s/gen", "perf/tokens_per_s/prepare", "perf/tokens_per_s/update"),
        "Tokens per second of a phase: generated, computed once, and trained in all epochs.",
    ),
    Explanation(
        "",
        ("perf/mfu/gen", "perf/mfu/update"),
        "Operations of the policy model as a share of the peak of the devices, if it is known (A100, H100, H200, B200, "
        "MI300X).",
    ),
    Explanation(
        "",
        ("perf/preemptions_per_response",),
        "How often vLLM dropped the cache of a response to make room for others, and computed it again.",
        "Usually 0; above 0.1 the KV cache is too small.",
    ),
    Explanation(
        "",
        ("perf/slowest_rank", "perf/slowest_rank_slowdown", "perf/compute_probe_s"),
        "Which train rank takes longest for a small matrix product, its time relative to the median rank, and the "
        "seconds of rank 0.",
        "Above 1.5 for many steps, and always the same rank: its device is slow, and all others wait for it.",
    ),
    Explanation(
        "",
        ("perf/controller_rss_gib", "perf/train_worker_rss_gib"),
        "Resident memory of the controller, and of a train rank.",
    ),
    Explanation(
        "",
        ("perf/max_memory_allocated_gib",),
        "Peak of a train rank's device memory in a step, on accelerators.",
    ),
    Explanation("elapsed", (), "Time since the run was started or resumed."),
    Explanation("eta", (), "Estimated time to the last step, from the mean of the last 20 steps."),
    Explanation(
        "warnings",
        (),
        "How many warnings the run has given so far, and the last one.",
        "Each says what to try, and most name a rule to explain; all are in `warnings.jsonl` in the folder of the run.",
    ),
)


def find_explanations(name: str) -> list[Explanation]:
    """Return the explanations of a label or a metric; several if a name is both."""
    found = [each for each in EXPLANATIONS if each.is_about(name)]
    exact = [each for each in found if name.casefold() == each.label or name in each.metrics]
    return exact or found[:1]


def list_metrics(label: str) -> tuple[str, ...]:
    """Return the metrics that a label shows."""
    return _METRICS[label]


def render_table() -> Iterator[str]:
    """Yield the lines of the table of metrics in docs/tracking.md."""
    yield "| metric | on a terminal | meaning |"
    yield "| --- | --- | --- |"
    for each in EXPLANATIONS:
        if each.metrics:
            names = ", ".join(f"`{metric}`" for metric in each.metrics)
            yield f"| {names} | {each.label} | {' '.join(filter(None, (each.meaning, each.usual)))} |"


def _to_pattern(metric: str) -> re.Pattern[str]:
    parts = re.split(r"<[^>]+>", metric)
    return re.compile(".+".join(map(re.escape, parts)))


_METRICS = {each.label: each.metrics for each in EXPLANATIONS if each.label}
