"""A recorded step is repeated in one process without Ray and vLLM, and a wrong layer of the engine is named.

make show-replay [ARGS="--short"]

Two runs on two train ranks, with Ray and vLLM, record their first and their last step (`trainer.replay.steps`): GRPO
with a KL to the reference, and PPO with a critic; both with two epochs of several mini-batches and micro-batches.
`verl replay` repeats each step in a process in which importing Ray or vLLM fails. Held: loss, gradient norms and every
other metric are the recorded ones to 1e-6; with another clipping range they are not.

Then weights are spoiled in a vLLM engine that has loaded the recorded ones: each of several kinds in each layer. Held:
trainer and engine agree in all layers before and after, and each time the layer with the wrong weight is named, and
nothing in the trainer. The same once through `verl replay --compare-engine`.

`--short`: one run in one process, transformers instead of vLLM, and fewer weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import REWARDS, ROOT, finish, sized_for_addition, train  # isort: skip - puts tests/ on the path
from _wrong_layer import VARIABLE

from verl.demo.assets import make_assets
from verl.rollout.engine import load_weights

TOLERANCE = 1e-6
KINDS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm")
BLOCKED = """
import sys
sys.modules |= {"ray": None, "vllm": None}  # importing them raises an ImportError, as where they are not installed
from verl.cli import main
code = main(sys.argv[1:])
assert not [name for name in sys.modules if name.split(".")[0] in ("ray", "vllm") and sys.modules[name] is not None]
sys.exit(code)
"""
GRPO = (
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
)
PPO = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "critic.ppo_micro_batch_size_per_gpu=5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    short = parser.parse_args().short
    steps = 2 if short else 4
    figures, passed = dict[str, Any](), True
    with tempfile.TemporaryDirectory(prefix="verl-replay-") as directory:
        folder = Path(directory)
        make_assets(folder)
        for name, algorithm in (("grpo", GRPO),) if short else (("grpo", GRPO), ("ppo", PPO)):
            run = folder / name
            code = start_run(folder, run, steps, algorithm, short=short)
            gaps = {step: measure_gaps(run, step) for step in ([steps] if short else [1, steps])}
            other = measure_gaps(run, steps, "actor_rollout_ref.actor.clip_ratio=0.02")
            largest = max(max(each.values()) for each in gaps.values())
            passed &= code == 0 and largest <= TOLERANCE and other["actor/pg_loss"] > TOLERANCE
            last = gaps[steps]
            figures[name] = {
                "steps": list(gaps),
                "metrics": len(last),
                "largest_gap": largest,
                **{f"gap_of_{metric}": last[metric] for metric in last if metric.endswith(("_loss", "grad_norm"))},
                "gap_with_another_clipping_range": other["actor/pg_loss"],
            }
        run, engine = folder / "grpo", "wrong_hf" if short else "wrong_vllm"
        layers = asyncio.run(plant_layers(run, steps, engine, short=short))
        command = compare_by_command(run, steps, engine)
        passed &= not layers["missed"] and not layers["false_alarms"] and command == "layer 1"
        finish("replay", passed, **figures, engine=engine, **layers, named_by_the_command=command)


def start_run(folder: Path, run: Path, steps: int, algorithm: tuple[str, ...], *, short: bool) -> int:
    """Train with uneven mini-batches and micro-batches, and record the first and the last step."""
    settings = [
        *sized_for_addition(folder),
        f"trainer.default_local_dir={run}",
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        f"actor_rollout_ref.rollout.name={'hf' if short else 'vllm'}",
        "actor_rollout_ref.rollout.n=4",
        f"reward.custom_reward_function.path={REWARDS}",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=False",
        f"trainer.replay.steps=[1,{steps}]",
        *(["trainer.local=true", "trainer.n_gpus_per_node=1"] if short else []),
        *algorithm,
    ]
    return train(*settings, deadline_s=900)[0]


def measure_gaps(run: Path, step: int, *overrides: str) -> dict[str, float]:
    """Replay a step where there is neither Ray nor vLLM; return by how much each metric differs."""
    command = [sys.executable, "-c", BLOCKED, "replay", str(run), f"--step={step}", "--json", *overrides]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600)
    assert done.stdout, "the replay has failed; its error is above"
    result = json.loads(done.stdout.splitlines()[-1])
    recorded, replayed = (
        {name: value for name, value in result[side].items() if not name.startswith("perf/")}
        for side in ("recorded", "replayed")
    )
    assert recorded.keys() == replayed.keys()
    assert "actor/pg_loss" in recorded
    return {name: abs(replayed[name] - value) / max(1.0, abs(value)) for name, value in recorded.items()}


async def plant_layers(run: Path, step: int, name: str, *, short: bool) -> dict[str, Any]:
    """Spoil weights in a running engine, one at a time; return how many layers were named, and which were not."""
    from verl.trainer.replay.layers import Comparer
    from verl.trainer.replay.step import open_policy, open_step

    recorded = open_step(run, step, [f"actor_rollout_ref.rollout.name={name}"])
    tokens = recorded.batch.samples[0].tokens.tolist()
    missed, false_alarms, named = list[str](), list[str](), 0
    with open_policy(recorded, "cpu") as policy:
        count = policy.actor.model.backbone.config.num_hidden_layers
        weights = [f"model.layers.{layer}.{kind}.weight" for kind in KINDS for layer in range(count)]
        comparer = Comparer(recorded, policy)
        async with comparer.start_engine() as engine:
            for version, weight in enumerate(["", *(weights[::5] if short else weights), ""]):
                os.environ[VARIABLE] = weight
                await load_weights(engine, comparer.pack_weights(), version)
                found = await comparer.compare(engine, tokens)
                print(f"{weight or 'no weight':<45} {[f'{each.engine:.1e}' for each in found.layers]}", flush=True)
                first, expected = found.find_first("engine"), int(weight.split(".")[2]) if weight else None
                if found.find_first("trainer") is not None or (first is not None and not weight):
                    false_alarms.append(weight)
                elif first != expected:
                    missed.append(f"{weight}: {first}")
                else:
                    named += bool(weight)
    return {"layers": count, "spoiled": version - 1, "named": named, "missed": missed, "false_alarms": false_alarms}


def compare_by_command(run: Path, step: int, name: str) -> str:
    """Return the layer of the engine that the command names when a weight of layer 1 is wrong."""
    command = [sys.executable, "-m", "verl", "replay", str(run), f"--step={step}", "--compare-engine"]
    settings = [f"actor_rollout_ref.rollout.name={name}", "actor_rollout_ref.model.external_lib=_wrong_layer"]
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, VARIABLE: "model.layers.1.mlp.down_proj.weight", "PYTHONPATH": path}
    done = subprocess.run([*command, *settings], stdout=subprocess.PIPE, text=True, timeout=600, env=variables)
    print(done.stdout, flush=True)
    found = re.search(r"the engine first differs in (layer \d+)", done.stdout)
    return found[1] if found else "none"


if __name__ == "__main__":
    main()
