"""A run that is stopped and resumed is the run that was not: the same metrics from the next step on, to the last digit.

One run of 4 steps; another that is given only 2, saves, ends, and is started again for all 4. With
`trainer.deterministic=True`, every metric of steps 3 and 4 (but for times) must be equal. `--ppo` does it with a
critic, its warm-up, and a KL in the reward whose weight adapts; `--engine hf` with transformers instead of vLLM.
`--short` (CI) is `--ppo --engine hf`, and resumes from the checkpoint that the uninterrupted run saved on its way.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from _common import REWARDS, finish, metrics_of, sized_for_addition, train

from verl.demo.assets import make_assets

STEPS, STOP = 4, 2
GRPO = ("actor_rollout_ref.actor.use_kl_loss=True",)
PPO = (
    "algorithm.adv_estimator=gae",
    "critic.optim.lr=1e-3",
    "trainer.critic_warmup=1",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ppo", action="store_true")
    parser.add_argument("--engine", default="vllm", choices=["vllm", "hf"])
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    if options.short:
        options.ppo, options.engine = True, "hf"
    proof, algorithm = ("resume_ppo", PPO) if options.ppo else ("resume", GRPO)
    algorithm += (f"actor_rollout_ref.rollout.name={options.engine}",)
    with tempfile.TemporaryDirectory(prefix="verl-resume-") as directory:
        folder = Path(directory)
        make_assets(folder)
        whole = run(folder, "whole", STEPS, algorithm)
        if options.short:
            copy_checkpoint(folder / "whole", folder / "parts", STOP)
        elif not run(folder, "parts", STOP, algorithm):
            finish(proof, False, reason="the run that is stopped failed")
        resumed = run(folder, "parts", STEPS, algorithm)
    if not (whole and resumed):
        finish(proof, False, reason="a run failed")
    expected_steps = range(STOP + 1 if options.short else 1, STEPS + 1)
    differences = {
        f"step {step}: {name}": (whole[step].get(name), resumed[step].get(name))
        for step in range(STOP + 1, STEPS + 1)
        for name in whole[step].keys() | resumed[step].keys()
        if whole[step].get(name) != resumed[step].get(name)
    }
    for place, (expected, found) in sorted(differences.items()):
        print(f"{place}: {expected} uninterrupted, {found} resumed")
    finish(
        proof,
        not differences and sorted(resumed) == list(expected_steps) and set(whole) == set(range(1, STEPS + 1)),
        engine=options.engine,
        steps=STEPS,
        stopped_after=STOP,
        metrics_compared=sum(len(whole[step]) for step in range(STOP + 1, STEPS + 1)),
        metrics_different=len(differences),
        reward=[whole[step]["reward/mean"] for step in sorted(whole)],
    )


def copy_checkpoint(source: Path, target: Path, step: int) -> None:
    """Make a run's folder with the checkpoint of one step in it, as if the run had ended there."""
    name = f"global_step_{step}"
    shutil.copytree(source / name, target / name)
    (target / "latest_checkpointed_iteration.txt").write_text(str(step))


def run(folder: Path, name: str, steps: int, algorithm: tuple[str, ...]) -> dict[int, dict[str, Any]]:
    """Step -> its metrics, without times."""
    code, _ = train(
        *sized_for_addition(folder),
        f"trainer.default_local_dir={folder / name}",
        "trainer.resume_mode=auto",
        "trainer.deterministic=True",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        *algorithm,
        f"reward.custom_reward_function.path={REWARDS}",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=2",
        "trainer.val_before_train=False",
        deadline_s=600,
    )
    if code != 0:
        return {}
    lines = [line for line in metrics_of(folder / name) if "reward/mean" in line]
    ignored = ("time", "timing_s/", "perf/")
    return {line["step"]: {k: v for k, v in line.items() if not k.startswith(ignored)} for line in lines}


if __name__ == "__main__":
    main()
