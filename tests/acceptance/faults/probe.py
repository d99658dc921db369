"""Whether the probe of a weight sync finds wrong weights and never refuses right ones, over models and dtypes.

make show-probe [ARGS=--short]

For each model and dtype: the tolerance that a run would derive, from noise of the size of rounding in the train engine;
what rounding really does (the model in that dtype against float32, with the same weights); and an engine, which is
another implementation of the model (eager attention of transformers, weights rounded to the dtype) after every one of
many updates of the weights. None may be refused. Then weights of the engine are damaged, one projection at a time in
the first, middle and last layer: 10% noise, another layer's weights, all noise; and 10% noise in all projections.

Noise in one projection moves the log-probs of a deep model less than rounding to bfloat16 does: no comparison of
log-probs can find it there. How much was found is printed for each kind; whole projections have to be.
`--short` (CI): three small models, few updates.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from _common import finish
from ranks import free_port
from tiny import tiny_qwen2
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.policy.trainer import PolicyTrainer
from verl.training.process_group import init_process_group
from verl.weights.probe import TOLERANCES, Probe

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NOISE = 0.1
DETECTED, PER_MODEL = 0.99, 17  # 12 cases: 204 syncs


@dataclass(frozen=True)
class Case:
    """A model, and the dtypes of train engine and rollout engine. `gain`: how large the effect of each layer is."""

    layers: int
    width: int
    vocabulary: int = 4096
    gain: float = 1.0
    compute: str = "bfloat16"
    engine: str = "bfloat16"

    def __str__(self) -> str:
        kind = self.compute if self.compute == self.engine else f"{self.compute}/{self.engine}"
        return f"{self.layers} layers of {self.width}, gain {self.gain:g}, {kind}"


SHORT = (
    Case(2, 64),
    Case(4, 128, engine="bfloat16", compute="float32"),
    Case(4, 128, compute="float32", engine="float32"),
)
CASES = (
    *SHORT,
    Case(2, 128, gain=0.5),
    Case(4, 256),
    Case(8, 256),
    Case(8, 256, compute="float32", engine="float32"),
    Case(12, 256, gain=0.5),
    Case(16, 256),
    Case(28, 256),
    Case(28, 128, compute="float32"),
    Case(24, 896, vocabulary=151_936),
)
"""0.6 million to 630 million parameters."""


def build(case: Case) -> PreTrainedModel:
    """Return a random model whose layers have outputs of the size of their inputs, times the gain."""
    torch.manual_seed(0)
    heads = max(2, case.width // 64)
    config = tiny_qwen2(
        vocab_size=case.vocabulary,
        hidden_size=case.width,
        intermediate_size=3 * case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.split(".")[-2] in PROJECTIONS and weight.ndim == 2:
            nn.init.normal_(weight, std=case.gain / weight.shape[1] ** 0.5)
        elif "embed" in name:
            nn.init.normal_(weight, std=1 / case.width**0.5)
    return model.eval()


@torch.no_grad()
def logprobs(model: nn.Module, sequences: Tensor) -> Tensor:
    values = model(sequences).logits[:, :-1].float().log_softmax(-1)
    return values.gather(-1, sequences[:, 1:, None]).squeeze(-1).flatten()


def damages(model: nn.Module, layers: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield kinds of damage, each with the weights that it replaces."""
    weights = {name: weight for name, weight in model.named_parameters() if name.split(".")[-2] in PROJECTIONS}
    weights = {name: weight.detach() for name, weight in weights.items() if weight.ndim == 2}
    generator = torch.Generator().manual_seed(1)

    def noise(weight: Tensor) -> Tensor:
        return weight.float().std() * torch.randn(weight.shape, generator=generator)

    yield "all 10%", {name: (w.float() + NOISE * noise(w)).to(w.dtype) for name, w in weights.items()}
    for layer in sorted({0, layers // 2, layers - 1}):
        for projection in PROJECTIONS:
            name = next(each for each in weights if f".{layer}." in each and f".{projection}." in each)
            other = name.replace(f".{layer}.", f".{(layer + 1) % layers}.")
            weight = weights[name]
            yield "one 10%", {name: (weight.float() + NOISE * noise(weight)).to(weight.dtype)}
            yield "one of another layer", {name: weights[other].clone()}
            yield "one all noise", {name: noise(weight).to(weight.dtype)}


def replaced(model: nn.Module, values: dict[str, Tensor], measure: Callable[[], Tensor]) -> Tensor:
    """Return what is measured with some weights replaced."""
    parameters = dict(model.named_parameters())
    before = {name: parameters[name].data for name in values}
    for name, value in values.items():
        parameters[name].data = value
    try:
        return measure()
    finally:
        for name, value in before.items():
            parameters[name].data = value


def run(case: Case, folder: Path, syncs: int) -> tuple[int, Counter[str], Counter[str]]:
    """Return false alarms, and by kind of damage how many there were and how many were found."""
    model = build(case)
    model.save_pretrained(folder)
    trainer = PolicyTrainer(FsdpEngine(FsdpSettings(str(folder), compute_dtype=case.compute, trainable=False)))
    coarser = max(case.compute, case.engine, key=TOLERANCES.__getitem__)
    probe = Probe.random(case.vocabulary, tolerance=TOLERANCES[coarser], dtype=coarser)
    sequences = torch.tensor(probe.sequences)
    rounding = trainer.measure_rounding(probe.sequences, coarser)
    probe = probe.calibrate(rounding)
    dtype = getattr(torch, case.engine)
    engine = copy.deepcopy(model).to(dtype)
    engine.set_attn_implementation("eager")
    real = float((logprobs(copy.deepcopy(engine).float(), sequences) - logprobs(engine, sequences)).abs().mean())

    def gap(found: Tensor) -> float:
        return float((torch.tensor([v for row in expected for v in row]) - found).abs().mean())

    alarms, largest = 0, 0.0
    trained, generator = dict(trainer.actor.model.hf.named_parameters()), torch.Generator().manual_seed(2)
    for sync in range(syncs):
        expected = trainer.compute_logprobs(probe.sequences)
        largest = max(largest, gap(logprobs(engine, sequences)))
        alarms += gap(logprobs(engine, sequences)) > probe.tolerance
        if sync == syncs - 1:
            break
        for name, weight in engine.named_parameters():  # an update, of 1% of the weights
            local = trained[name].to_local()
            local.mul_(1 + 0.01 * torch.randn(local.shape, generator=generator))
            weight.data = local.to(dtype)
    total, found = Counter[str](), Counter[str]()
    for kind, values in damages(engine, case.layers):
        total[kind] += 1
        found[kind] += gap(replaced(engine, values, lambda: logprobs(engine, sequences))) > probe.tolerance
    parameters = sum(weight.numel() for weight in model.parameters()) / 1e6
    shares = " ".join(f"{kind}: {found[kind]}/{total[kind]};" for kind in total)
    print(
        f"{case!s:52} {parameters:6.1f}M rounding {rounding:.2e} (really {real:.2e}) healthy <= {largest:.2e} "
        f"tolerance {probe.tolerance:.2e} | {shares}",
        flush=True,
    )
    return alarms, total, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    init_process_group(0, 1, "127.0.0.1", free_port())
    alarms, total, found = 0, Counter[str](), Counter[str]()
    cases, syncs = (SHORT, 3) if options.short else (CASES, PER_MODEL)
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="verl-probe-") as folder:
            wrong, damaged, seen = run(case, Path(folder), syncs)
            alarms, total, found = alarms + wrong, total + damaged, found + seen
    dist.destroy_process_group()
    shares = {kind: round(found[kind] / count, 4) for kind, count in total.items()}
    finish(
        "probe",
        alarms == 0 and shares["all 10%"] == 1 and shares["one all noise"] >= DETECTED,
        cases=len(cases),
        syncs=len(cases) * syncs,
        false_alarms=alarms,
        found=shares,
    )


if __name__ == "__main__":
    main()
