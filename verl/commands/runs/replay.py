"""`verl replay`: run a recorded step of a run again, in one process."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.commands.arguments import ArgumentParser
from verl.redaction import show_controls

if TYPE_CHECKING:
    from verl.trainer.replay.layers import LayerComparison
    from verl.trainer.replay.step import RecordedStep, TracedUpdate
    from verl.training.policy.trainer import PolicyTrainer
    from verl.types import Sample

HELP = """\
usage: verl replay RUN --step N [--sample GROUP/INDEX[/BRANCH]] [--compare-engine] [--tolerance X] [--json]
                   [key=value ...]

Run the update of a step again that the run has recorded (trainer.replay.steps), in one process, without Ray and without
rollout engines: with the weights, the optimizer state and the samples of that step, whatever the number of ranks was.
Prints each metric as recorded and as replayed, and returns 1 if one of them differs.

The settings are those of the run. Override what is elsewhere on this machine, such as the path of the model. Copy
starts.jsonl and the folder replay/ of the run to replay it on another machine.

options:
  RUN            folder of the run (trainer.default_local_dir)
  --step N       a recorded step
  --sample S     also print the tokens of a response in each update: log-probs of the engine, before the step and at the
                 update, ratio, advantage, and the derivative of the loss by the log-prob
  --compare-engine
                 also start the rollout engine of the run with the weights of the step, and name the first layer in
                 which it, or the trainer, differs from transformers by more than rounding; on that response, or on the
                 one on which trainer and engine differed most
  --tolerance X  how far a metric may differ, absolute and relative (default 1e-6)
  --json         print the result as one line of JSON

examples:
  verl replay checkpoints/verl/default --step 3
  verl replay checkpoints/verl/default --step 3 --sample 17/2 actor_rollout_ref.model.path=~/models/Qwen2.5-0.5B
  verl replay checkpoints/verl/default --step 3 --compare-engine
"""


_NOT_COMPARED = "perf/"  # memory: another machine has another one


def main(argv: Sequence[str]) -> int:
    """Print recorded and replayed metrics; return 1 if they differ."""
    parser = ArgumentParser("verl replay")
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--sample", type=_parse_sample, metavar="GROUP/INDEX")
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--compare-engine", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_intermixed_args(list(argv))
    from verl.trainer.replay.step import Trace, open_policy, open_step, update  # imports torch

    recorded = open_step(options.run, options.step, options.settings)
    chosen = None if options.sample is None else recorded.find(*options.sample)
    trace, comparison = None if chosen is None else Trace(chosen), list[str]()
    with open_policy(recorded) as policy:
        metrics = policy.prepare(recorded.batch.samples, recorded.batch.plan)
        if options.compare_engine:
            comparison += compare_engine(recorded, policy, chosen)
        metrics |= update(policy, recorded.batch, trace)
    differing = find_differences(recorded.metrics, metrics, options.tolerance)
    if options.json:
        result = {"step": options.step, "differing": differing, "recorded": dict(recorded.metrics), "replayed": metrics}
        sys.stdout.write(f"{json.dumps(result)}\n")
        return int(bool(differing))
    lines = [_describe(recorded), *describe_metrics(recorded.metrics, metrics, differing, options.tolerance)]
    lines += comparison
    if trace is not None:
        decode = _load_decoder(recorded)
        lines += [line for update in trace.updates for line in ("", *describe_update(update, decode))]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return int(bool(differing))


def find_differences(recorded: Mapping[str, float], replayed: Mapping[str, float], tolerance: float) -> list[str]:
    """Return the metrics that differ, or that one side lacks."""
    return [
        name
        for name in {**recorded, **replayed}
        if not name.startswith(_NOT_COMPARED) and not _is_same(recorded.get(name), replayed.get(name), tolerance)
    ]


def _is_same(a: float | None, b: float | None, tolerance: float) -> bool:
    if a is None or b is None:
        return False
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) or (math.isnan(a) and math.isnan(b))


def describe_metrics(
    recorded: Mapping[str, float], replayed: Mapping[str, float], differing: Sequence[str], tolerance: float
) -> Iterator[str]:
    """Yield a line for each metric, and the verdict."""
    names = [name for name in {**recorded, **replayed} if not name.startswith(_NOT_COMPARED)]
    width = max(map(len, names), default=0)
    yield f"{'metric':<{width}}  {'recorded':>15}  {'replayed':>15}  {'difference':>10}"
    for name in names:
        a, b = recorded.get(name, math.nan), replayed.get(name, math.nan)
        mark = "  differs" if name in differing else ""
        yield f"{name:<{width}}  {a:>15.8g}  {b:>15.8g}  {b - a:>10.1e}{mark}"
    yield ""
    if differing:
        yield f"{len(differing)} of {len(names)} metrics differ by more than {tolerance:g}: {', '.join(differing)}"
    else:
        yield f"the same: no metric differs by more than {tolerance:g}"


def compare_engine(recorded: RecordedStep, policy: PolicyTrainer, chosen: int | None) -> Iterator[str]:
    """Yield the layers of trainer and engine on one sample, and which of them is the first to differ."""
    from verl.trainer.replay.layers import Comparer

    batch = recorded.batch
    gaps = [measure_gap(policy, sample, index) for index, sample in enumerate(batch.samples)]
    chosen = max(range(len(gaps)), key=gaps.__getitem__) if chosen is None else chosen
    sample = batch.samples[chosen]
    comparison = asyncio.run(Comparer(recorded, policy).run(sample.tokens.tolist()))
    yield ""
    yield (
        f"sample {sample.group}/{sample.index}: the log-probs of trainer and engine differed by {gaps[chosen]:.2g} on "
        f"average in the run, and differ by {comparison.gap:.2g} now"
    )
    yield from describe_layers(comparison, gaps[chosen])


def measure_gap(policy: PolicyTrainer, sample: Sample, index: int) -> float:
    """Return the mean difference of the engine's log-probs in the run from those of a policy that has prepared."""
    logprobs, _ = policy.read_tokens(index)
    return float(abs(logprobs - sample.logprobs)[sample.mask].mean()) if sample.mask.any() else 0.0


def describe_layers(comparison: LayerComparison, recorded_gap: float) -> Iterator[str]:
    """Yield the differences by layer from transformers in float32, and the verdict."""
    firsts = {side: comparison.find_first(side) for side in ("trainer", "engine")}
    yield f"{'layer':>5}  {'rounding':>9}  {'trainer':>9}  {'engine':>9}"
    for each in comparison.layers:
        marks = [side for side, first in firsts.items() if first == each.layer]
        mark = f"  <- {' and '.join(marks)}" if marks else ""
        yield f"{each.layer:>5}  {each.rounding:>9.1e}  {each.trainer:>9.1e}  {each.engine:>9.1e}{mark}"
    yield ""
    for side, first in firsts.items():
        if first is not None:
            before = "; the embedding comes before it, too" if first == 0 else ""
            yield f"the {side} first differs in layer {first} from transformers with the same weights{before}"
    if any(first is not None for first in firsts.values()):
        return
    if comparison.gap > comparison.tolerance:
        yield "all layers agree, but the log-probs do not: the final norm or the output head differs"
    elif recorded_gap > comparison.tolerance:
        yield "trainer and engine agree now: in the run, the engine had older or other weights"
    else:
        yield "trainer and engine agree in all layers"


def describe_update(update: TracedUpdate, decode: Callable[[int], str]) -> Iterator[str]:
    """Yield the tokens of a sample that an update has trained."""
    yield f"update {update.update + 1}: the sample's share of the loss is {update.loss:.6g}"
    yield (
        f"{'position':>8}  {'token':>8}  {'engine':>9}  {'before':>9}  {'now':>9}  {'ratio':>8}  {'reference':>9}  "
        f"{'advantage':>9}  {'gradient':>10}  text"
    )
    for position in update.mask.nonzero().flatten().tolist():
        token = int(update.tokens[position])
        before, now = float(update.old[position]), float(update.current[position])
        engine, reference = (
            "-" if values is None else f"{float(values[position]):.4f}" for values in (update.rollout, update.reference)
        )
        yield (
            f"{position:>8}  {token:>8}  {engine:>9}  {before:>9.4f}  {now:>9.4f}  {math.exp(now - before):>8.4f}  "
            f"{reference:>9}  {float(update.advantages[position]):>9.4f}  {float(update.gradients[position]):>10.2e}  "
            f"{show_controls(decode(token))}"
        )


def _describe(recorded: RecordedStep) -> str:
    batch = recorded.batch
    ranks = "1 rank" if batch.ranks == 1 else f"{batch.ranks} ranks"
    return (
        f"{recorded.folder}: {len(batch.samples):,} samples of {ranks} on {batch.device}, "
        f"{len(batch.plan.policy)} updates\n"
    )


def _load_decoder(recorded: RecordedStep) -> Callable[[int], str]:
    """Return the text of a token; none without a tokenizer on this machine."""
    from verl.data.chat import load_tokenizer

    model = recorded.config.actor_rollout_ref.model
    try:
        tokenizer = load_tokenizer(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError):
        return lambda token: ""
    return lambda token: str(tokenizer.decode([token]))


def _parse_sample(text: str) -> tuple[int, ...]:
    parts = text.split("/")
    if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts):
        raise ArgumentTypeError(f"{text!r} is not GROUP/INDEX, such as 17/2")
    return tuple(map(int, parts))
