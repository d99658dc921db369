"""On-policy distillation needs fewer samples than GRPO to come close to its teacher.

The teacher is the warm start of the student, trained further on correct responses. Student and GRPO start from the same
model, on real Ray, FSDP2 and vLLM; GRPO gets scores, the student only the teacher, which reads the tokens that the
student sampled. Held-out accuracy must reach that of the teacher minus 0.05 after fewer sampled responses than with
GRPO. `--mode reward` takes the KL as a reward instead of exact in the loss. `--short` (CI) trains a few deterministic
steps in one process, without GRPO: accuracy must rise, and the KL to the teacher must fall.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from _common import finish, metrics_of, sized_for_addition, train

from verl.demo.assets import make_assets
from verl.demo.warmup import warm_up

METRIC, KL = "val/addition/mean@1", "actor/distillation_kl"
EVERY, STEPS, GRPO_STEPS = 2, 30, 40
SAMPLES, GRPO_SAMPLES = 256, 512  # per step: one response to each prompt, and 8 to each of 64
MARGIN = 0.05
STUDENT = (
    f"data.train_batch_size={SAMPLES}",
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
)
GRPO = (
    "data.train_batch_size=64",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.optim.lr=3e-4",
)
SHORT = (
    "trainer.local=True",
    "actor_rollout_ref.rollout.name=hf",
    "trainer.deterministic=True",
    "data.val_max_samples=128",
)


def run(name: str, assets: Path, folder: Path, steps: int, *overrides: str) -> list[dict[str, Any]]:
    """Return the metrics of one run, none if it failed."""
    code, _ = train(
        *sized_for_addition(assets),
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={EVERY}",
        f"trainer.default_local_dir={folder}",
        *overrides,
        config=f"examples/algorithms/{name}.yaml",
        deadline_s=2400,
    )
    return metrics_of(folder) if code == 0 else []


def curve(lines: list[dict[str, Any]], metric: str = METRIC) -> list[float]:
    return [round(line[metric], 4) for line in lines if metric in line]


def samples_to(bar: float, accuracies: list[float], samples: int) -> int | None:
    """Return the responses sampled until the first validation that reaches the bar; None if none does."""
    reached = [k for k, accuracy in enumerate(accuracies) if accuracy >= bar]
    return reached[0] * EVERY * samples if reached else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--mode", choices=("reward", "loss"), default="loss")
    parser.add_argument("--keep", type=Path, help="folder for the metrics of the student's run")
    parser.add_argument("overrides", nargs="*", help="further settings of the student's run")
    options = parser.parse_args()
    short = options.short
    with tempfile.TemporaryDirectory(prefix="verl-distillation-") as directory:
        assets, teacher = Path(directory, "student"), Path(directory, "teacher")
        make_assets(assets)
        print(f"the student: {warm_up(assets)}", flush=True)
        shutil.copytree(assets, teacher)
        taught = warm_up(teacher, target=0.9, seed=1)
        print(f"the teacher: {taught}", flush=True)
        settings = (f"distillation.teacher.path={teacher / 'model'}", f"distillation.mode={options.mode}")
        steps, sizes = (8, (*STUDENT, *SHORT)) if short else (STEPS, STUDENT)
        student = (*settings, *sizes, *options.overrides)
        lines = run("distillation", assets, (options.keep or Path(directory)) / "distillation", steps, *student)
        grpo = [] if short else run("grpo", assets, Path(directory, "grpo"), GRPO_STEPS, *GRPO)
    bar, kl = taught.accuracy - MARGIN, curve(lines, KL)
    distilled, scored = samples_to(bar, curve(lines), SAMPLES), samples_to(bar, curve(grpo), GRPO_SAMPLES)
    if short:
        passed = len(kl) > 1 and curve(lines)[-1] >= curve(lines)[0] + 0.05 and kl[-1] < kl[0]
    else:  # a GRPO that never gets there needed more than all of its samples
        passed = distilled is not None and bool(grpo) and (scored is None or distilled < scored)
    finish(
        "distillation",
        passed,
        short=short,
        mode=options.mode,
        teacher=round(taught.accuracy, 4),
        bar=round(bar, 4),
        samples_distilled=distilled,
        samples_grpo=scored,
        samples_grpo_at_most=None if short else GRPO_STEPS * GRPO_SAMPLES,
        curve_distilled=curve(lines),
        curve_grpo=curve(grpo),
        kl_to_the_teacher=kl,
    )


if __name__ == "__main__":
    main()
