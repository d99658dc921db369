"""Every algorithm learns: one warm start, the settings of `examples/algorithms`, real Ray, FSDP2 and vLLM.

Each algorithm trains two-digit addition from the same model; held-out greedy accuracy must rise by 0.2 within 5
minutes, from the command to the last validation. The table: algorithm, start, end, steps, seconds. `--short` (CI) takes
one of them, chosen by the commit, samples deterministically, requires half the rise and has no time limit. `--only
grpo,ppo` runs these.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from _common import REWARDS, ROOT, finish, metrics_of, sized_for_addition, train

from verl.demo.assets import make_assets
from verl.demo.warmup import warm_up

METRIC = "val/addition/mean@1"
SECONDS = 300
ONE_ANSWER = ("data.train_batch_size=512", "actor_rollout_ref.actor.ppo_mini_batch_size=256")  # 512 responses in total
ONE_UPDATE = ("actor_rollout_ref.actor.ppo_mini_batch_size=64",)
"""For losses without a clip: the second update of a step would use responses that are stale after the first."""
FOUR_ANSWERS = (
    "data.train_batch_size=128",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
)
"""For pass@k: a group learns only if one response is better than all others, which is rare among eight."""
FOUR_TOKENS = ("reward.prime.lr=3e-4", "reward.prime.beta=1.0", "reward.prime.coef=1.0")
"""For PRIME: beta 0.05 suits hundreds of tokens. In so few steps the reward model, as small as the policy, predicts new
responses hardly better than chance: its rewards get a fifth of the weight of the score."""
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "ppo": (*ONE_ANSWER, "critic.optim.lr=1e-3", "critic.ppo_micro_batch_size_per_gpu=256"),
    "grpo": (),
    "dr_grpo": (),
    "dapo": ("data.max_response_length=8", "reward.overlong_buffer.len=2"),
    "rloo": (),
    "reinforce_plus_plus": ONE_ANSWER,
    "reinforce_plus_plus_baseline": (),
    "remax": ONE_ANSWER,
    "gspo": (),
    "cispo": ONE_UPDATE,
    "opo": (),
    "optimal_token_baseline": (),
    "gpg": ONE_UPDATE,
    "online_dpo": ONE_UPDATE,
    "spin": ("data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=128"),
    "sppo": ONE_UPDATE,
    "prime": FOUR_TOKENS,
    "dppo": (),
    "off_policy_mask": (),
    "sapo": (),
    "gmpo": (),
    "clip_cov": (),
    "kl_cov": (),
    "grpo_passk": FOUR_ANSWERS,
    "gigpo": (),
    "gdpo": (
        "reward.functions=[]",
        f"reward.custom_reward_function.path={REWARDS}",
        "reward.custom_reward_function.name=score_digits",
        "algorithm.reward_components=[digits,format]",
    ),
}
"""What the sizes of this task change in each example: nothing of the algorithm itself."""


def run(name: str, sizes: tuple[str, ...], assets: Path, folder: Path, steps: int, overrides: list[str]) -> dict:
    """Run one algorithm, from the command to the last validation."""
    code, watch = train(
        *sized_for_addition(assets),
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=3",  # Adam's first steps are large; not every loss clips them
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={max(1, steps // 4)}",
        f"trainer.default_local_dir={folder}",
        *sizes,
        *overrides,
        config=f"examples/algorithms/{name}.yaml",
        deadline_s=8 * SECONDS,
    )
    curve = [round(line[METRIC], 4) for line in metrics_of(folder) if METRIC in line] if code == 0 else []
    return {
        "algorithm": name,
        "start": curve[0] if curve else None,
        "end": curve[-1] if curve else None,
        "steps": steps,
        "seconds": round(watch.own_seconds()),
        "wall_seconds": round(watch.seconds()),
        "curve": curve,
        "exit_code": code,
    }


def by_commit(names: list[str], count: int) -> list[str]:
    """Return some of the names, different ones for every commit."""
    commits = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    first = int(commits.stdout or 0) * count
    return [names[(first + k) % len(names)] for k in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--keep", type=Path, help="folder for the table and the runs' metrics")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(ALGORITHMS)
    if options.short and not options.only:
        names = by_commit(names, 1)
    steps = options.steps or (20 if options.short else 24)
    overrides = [f"trainer.deterministic={options.short}", *options.overrides]
    rows = []
    with tempfile.TemporaryDirectory(prefix="verl-algorithms-") as directory:
        folder = Path(directory)
        make_assets(folder)
        print(f"before reinforcement learning: {warm_up(folder)}", flush=True)
        for name in names:
            rows.append(run(name, ALGORITHMS[name], folder, (options.keep or folder) / name, steps, overrides))
            print(json.dumps(rows[-1]), flush=True)
    asked = 0.1 if options.short else 0.2
    for row in rows:
        learned = row["end"] is not None and row["end"] - row["start"] >= asked
        row["pass"] = learned and (options.short or row["seconds"] <= SECONDS)
    print(f"{'algorithm':30} {'start':>6} {'end':>6} {'steps':>6} {'seconds':>8}")
    for row in rows:
        ends = [f"{row[key]:6.3f}" if row[key] is not None else "failed" for key in ("start", "end")]
        mark = "" if row["pass"] else " !"
        print(f"{row['algorithm']:30} {ends[0]} {ends[1]} {row['steps']:6} {row['seconds']:8}{mark}")
    if options.keep:
        (options.keep / "table.json").write_text(json.dumps(rows, indent=1))
    finish(
        "algorithms",
        all(row["pass"] for row in rows),
        short=options.short,
        rise_asked=asked,
        least_rise=min((round(row["end"] - row["start"], 4) for row in rows if row["end"] is not None), default=None),
        most_seconds=max(row["seconds"] for row in rows),
        learned=[row["algorithm"] for row in rows if row["pass"]],
        failed=[row["algorithm"] for row in rows if not row["pass"]],
    )


if __name__ == "__main__":
    main()
