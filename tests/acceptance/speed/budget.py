"""Check the memory plan of large models: closed form against fake tensors, and fake tensors against real ones.

make show-budget [ARGS=--short]

Fake tensors run the real sharding, passes, optimizer, weight sync and save as rank 0 of 8 to 1,024 ranks, and count the
bytes of live tensors; the closed form must be within 10% of their peak in every phase. For a small model, fake tensors
must be within 10% of the live tensors of 2 gloo ranks. Then `verl plan` must find settings with which 7B and 14B fit on
8 devices of 80 GiB, 32B on 32 and 72B on 64; 7B must fit at the defaults. Nothing here has run on an accelerator.
"""

import argparse
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from _common import ROOT, finish  # noqa: F401 - finds what tests share
from memory_measure import make_batch, measure, measure_phases
from memory_tracker import MemoryTracker
from public_models import MODELS
from ranks import free_port, run_ranks
from tiny import tiny_qwen2
from transformers import Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from verl.config.load import load
from verl.config.paths import change_settings
from verl.memory_plan.accelerators import assume_device
from verl.memory_plan.device_memory import USABLE
from verl.memory_plan.model_memory import ModelMemory, PassSize
from verl.memory_plan.run_plan import plan_memory
from verl.memory_plan.suggestions import format_changes, suggest_settings
from verl.models.model_shape import ModelShape
from verl.trainer.build.worker_settings import train_settings
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.process_group import init_process_group

GIB, LIMIT, MEMORY = 1 << 30, 0.10, 80 << 30
LARGE = {"compute_dtype": "bfloat16", "gradient_checkpointing": True, "device": "cuda"}
PLAIN = {"gradient_checkpointing": False}
OFFLOAD = {"param_offload": True, "optimizer_offload": True}
FEW_LAYERS = {name: MODELS[name] | {"num_hidden_layers": 4} for name in ("Qwen2.5-0.5B", "Qwen2.5-7B")}


@dataclass(frozen=True, eq=False)
class Case:
    """A model on a number of ranks, with a micro-batch of sequences of equal length, half of each a prompt."""

    model: str
    ranks: int
    sequences: int
    length: int
    options: dict = field(default_factory=dict)
    accumulates: bool = False

    def __str__(self):
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.model:13} {self.ranks:5} ranks {self.sequences:2} x {self.length:5} {options}"

    @property
    def settings(self):
        return FsdpSettings(self.model, **LARGE | self.options)

    def measure(self, models=MODELS):
        lengths, prompt = [self.length] * self.sequences, self.length // 2
        return measure(
            models[self.model], self.settings, self.ranks, lengths, prompt=prompt, accumulates=self.accumulates
        )

    def estimate(self, models=MODELS):
        size = PassSize(self.sequences * self.length, self.sequences * (self.length - self.length // 2))
        shape = ModelShape.from_config(models[self.model])
        memory = ModelMemory(shape, self.settings, self.ranks, size, size, 2 if self.accumulates else 1)
        return {phase: usage.total for phase, usage in memory.peaks().items()}


CASES = (
    Case("Qwen2.5-0.5B", 8, 4, 1024, PLAIN),
    Case("Qwen2.5-0.5B", 8, 8, 1024, accumulates=True),
    Case("Qwen2.5-0.5B", 64, 4, 2048, {"reshard_after_forward": False}),
    Case("Qwen2.5-0.5B", 1024, 16, 1024, {"logprob_chunk": 1024}),
    Case("Qwen2.5-7B", 8, 4, 1024, PLAIN),
    Case("Qwen2.5-7B", 8, 8, 2048, OFFLOAD, accumulates=True),
    Case("Qwen2.5-7B", 16, 1, 16384, {"logprob_chunk": 1024}),
    Case("Qwen2.5-7B", 128, 4, 1024, {"optimizer_offload": True}),
    Case("Qwen2.5-7B", 1024, 8, 1024),
    Case("Qwen2.5-14B", 16, 8, 1024),
    Case("Qwen2.5-14B", 64, 8, 1024, OFFLOAD),
    Case("Qwen3-30B-A3B", 8, 4, 1024),
    Case("Qwen3-30B-A3B", 64, 8, 1024),
    Case("Qwen3-30B-A3B", 512, 4, 2048, {"optimizer_offload": True}),
    Case("Qwen2.5-32B", 64, 8, 1024),
    Case("Qwen2.5-32B", 512, 4, 2048),
    Case("Qwen2.5-72B", 1024, 8, 1024),
)
PLANS = {"Qwen2.5-7B": 8, "Qwen2.5-14B": 8, "Qwen2.5-32B": 32, "Qwen2.5-72B": 64}
"""Model -> devices of 80 GiB on which it must fit."""

SHORT = (
    Case("Qwen2.5-0.5B", 8, 4, 1024, PLAIN),
    Case("Qwen2.5-7B", 64, 8, 1024, accumulates=True),
    Case("Qwen2.5-7B", 8, 4, 1024, {"optimizer_offload": True}),
)
SMALL = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "both": {"compute_dtype": "bfloat16", "gradient_checkpointing": True},
    "no_reshard": {"reshard_after_forward": False, "gradient_checkpointing": True},
    "bfloat16_weights": {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"},
}
"""Settings of the small model on 2 gloo ranks."""


def small_model():
    return tiny_qwen2(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )


def small_batch():
    return {"lengths": [96, 96, 64], "prompt": 32}


def rank_main(rank, port, folder, names):
    torch.set_num_threads(1)
    init_process_group(rank, 2, "127.0.0.1", port)
    results = {}
    for name in names:
        tracker = MemoryTracker()
        engine = FsdpEngine(FsdpSettings(str(folder / "model"), **SMALL[name]))
        with tracker.counting():
            results[name] = measure_phases(engine, tracker, make_batch(**small_batch()))
        del engine
    if rank == 0:
        (folder / "peaks.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def compare_with_real(names):
    """Return setting -> phase -> fake peak as a share of the real one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        Qwen2ForCausalLM(small_model()).save_pretrained(folder / "model")
        run_ranks(rank_main, 2, free_port(), folder, names, deadline_s=900)
        real = json.loads((folder / "peaks.json").read_text())
    ratios = {}
    for name in names:
        fake = measure(small_model().to_dict(), FsdpSettings("small", **SMALL[name]), 2, **small_batch())
        ratios[name] = {phase: fake[phase] / real[name][phase] for phase in fake}
        print(f"fake / real, {name:18}", *(f"{phase} {ratio:.3f}" for phase, ratio in ratios[name].items()), flush=True)
    return ratios


def run_case(case):
    return case.measure()


def compare_with_estimate(cases, models=MODELS, workers=2):
    """Return the case -> phase -> estimated peak as a share of the measured one."""
    ratios = {}
    if workers == 1:
        measured = (case.measure(models) for case in cases)
        return {case: report(case, peaks, case.estimate(models)) for case, peaks in zip(cases, measured, strict=True)}
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for case, peaks in zip(cases, pool.map(run_case, cases), strict=True):
            ratios[case] = report(case, peaks, case.estimate(models))
    return ratios


def report(case, peaks, estimate):
    ratios = {phase: estimate[phase] / peaks[phase] for phase in peaks if peaks[phase] > GIB // 1024}
    cells = (f"{phase} {peaks[phase] / GIB:.1f} ({ratios[phase]:.2f})" for phase in ratios)
    print(f"{case!s:60}", *cells, flush=True)
    return ratios


def load_config(folder, model, ranks):
    path = folder / model
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODELS[model]))
    settings = [f"actor_rollout_ref.model.path={path}", f"trainer.nnodes={ranks // 8}", "trainer.n_gpus_per_node=8"]
    (loaded,) = load(settings, complete=False)
    return loaded.config


def make_plans():
    """Return model -> (settings that `verl plan` proposes, whether it fits with them, its run with them)."""
    plans = {}
    with tempfile.TemporaryDirectory() as name:
        for model, ranks in PLANS.items():
            config = load_config(Path(name), model, ranks)
            changes = suggest_settings(config, assume_device(MEMORY), train_settings)
            changed = change_settings(config, {key: value for each in changes for key, value in each.values.items()})
            run = plan_memory(changed, train_settings)
            plans[model] = format_changes(changes), not run.problems(MEMORY), run
            print(f"plan of {model} on {ranks}: fits {plans[model][1]} {' '.join(plans[model][0])}", flush=True)
    return plans


def case_of(model, run):
    """Return the measurement of the policy of a planned run."""
    actor = run.models["actor"]
    options = {name: getattr(actor.settings, name) for name in ("param_offload", "optimizer_offload")}
    return Case(model, actor.ranks, actor.update.tokens // 1024, 1024, options, actor.micro_batches > 1)


def fits_as_measured(run, peaks):
    """Return whether a planned run fits with the measured instead of the estimated peaks of its policy."""
    own = {phase: usage.total for phase, usage in run.models["actor"].peaks().items()}
    totals = {phase: usage.total for phase, usage in run.phases(MEMORY).items()}
    return all(totals[phase] - own[phase] + peaks[phase] <= USABLE * MEMORY for phase in peaks)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="two settings of the small model, models of four layers")
    parser.add_argument("--workers", type=int, default=2, help="processes that measure at the same time")
    options = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    plans = make_plans()
    real = compare_with_real(["checkpointing", "both"] if options.short else list(SMALL))
    if options.short:
        ratios = compare_with_estimate(SHORT, FEW_LAYERS, workers=1)
    else:
        planned = {model: case_of(model, run) for model, (_, _, run) in plans.items()}
        ratios = compare_with_estimate([*CASES, *planned.values()], workers=options.workers)
        estimates = {model: case.estimate() for model, case in planned.items()}
        for model, case in planned.items():
            peaks = {phase: estimates[model][phase] / ratio for phase, ratio in ratios[case].items()}
            settings, fits, run = plans[model]
            plans[model] = settings, fits and fits_as_measured(run, peaks), run
    off = {str(case).strip(): max(abs(ratio - 1) for ratio in phases.values()) for case, phases in ratios.items()}
    fake_off = {name: max(abs(ratio - 1) for ratio in phases.values()) for name, phases in real.items()}
    fits = all(fits for _, fits, _ in plans.values()) and not plans["Qwen2.5-7B"][0]
    finish(
        "budget",
        max(off.values()) <= LIMIT and max(fake_off.values()) <= LIMIT and fits,
        configurations=len(off),
        estimate_off=round(max(off.values()), 4),
        fake_off={name: round(value, 4) for name, value in fake_off.items()},
        plans={model: " ".join(settings) or "defaults" for model, (settings, _, _) in plans.items()},
        fit=fits,
    )


if __name__ == "__main__":
    main()
