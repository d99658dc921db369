"""Learn the addition task by reinforcement learning with an adapter of at most 3 % of the parameters.

Real Ray, FSDP2 on 2 ranks and vLLM, GRPO with a KL to the reference, which is the model with its adapter disabled.
Checked: held-out greedy accuracy rises by at least 0.10; the weights below the adapter are those of the file, bit by
bit; the reference's log-probs are those of the model without an adapter, bit by bit; what a weight sync sends, and its
share of the model; the engines' log-probs of sampled tokens are within 1e-4 of the trainer's, in every step; `verl
merge` writes a merged model and an adapter which, in a process that has never imported verl, give the trainer's log-
probs (1e-4). `--short` (CI): one rank and 10 steps, in which the reward of sampled responses must rise by 0.03 from the
first three to the last three; nothing is validated.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from _common import finish, metrics_of, sized_for_addition
from safetensors.torch import load_file

from verl.config.load import load
from verl.data.flat_batch import FlatBatch
from verl.demo.assets import make_assets
from verl.demo.warmup import warm_up
from verl.tracking.console import Console
from verl.trainer.build.rl_builder import build_trainer
from verl.workers.train import PolicyGroup

SHARE, PARITY, RISE, RISE_OF_REWARD = 0.03, 1e-4, 0.10, 0.03
VALIDATION, GAP = "val/addition/mean@1", "training/rollout_logprobs_diff_max"
PROBE = [[(7919 * index * (row + 1)) % 258 for index in range(12)] for row in range(8)]
STRANGER = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, merged, tokens, out = sys.argv[1:]
tokens = torch.load(tokens, weights_only=True)
models = [PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)]
models += [AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)]
with torch.no_grad():
    logits = [model.eval()(tokens).logits[:, :-1] for model in models]
torch.save([each.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0] for each in logits], out)
assert not any(name.split(".")[0] == "verl" for name in sys.modules)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    short, steps = options.short, options.steps or (10 if options.short else 40)
    with tempfile.TemporaryDirectory(prefix="verl-lora-") as directory:
        folder = Path(directory)
        make_assets(folder)
        print(f"before reinforcement learning: {warm_up(folder)}", flush=True)
        [loaded] = load([*settings(folder, steps, short), *options.overrides])
        results = asyncio.run(run(loaded.config, folder))
        lines = metrics_of(folder / "run")
        results |= exported(folder, results.pop("logprobs"))
    accuracy = [line[VALIDATION] for line in lines if VALIDATION in line]
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    parity = max(line[GAP] for line in lines if GAP in line)
    first, last = mean(rewards[:3]), mean(rewards[-3:])
    learned = last - first >= RISE_OF_REWARD if short else accuracy[-1] - accuracy[0] >= RISE
    finish(
        "lora",
        learned
        and results["trained_share"] <= SHARE
        and results["base_unchanged"]
        and results["reference_is_base"]
        and results["moved"] > 0.01
        and parity <= PARITY
        and results["exported_gap"] <= PARITY,
        short=short,
        steps=steps,
        accuracy=[round(value, 3) for value in accuracy],
        reward_of_first_3=round(first, 3),
        reward_of_last_3=round(last, 3),
        largest_gap=parity,
        allowed=PARITY,
        **results,
    )


def settings(folder: Path, steps: int, short: bool) -> list[str]:
    return [
        *sized_for_addition(folder),
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.optim.lr=5e-3",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.peft.peft_type=lora",
        "actor_rollout_ref.actor.peft.lora_rank=2",
        "actor_rollout_ref.actor.peft.lora_alpha=4",
        "actor_rollout_ref.rollout.n=8",
        f"trainer.n_gpus_per_node={1 if short else 2}",
        f"trainer.deterministic={short}",  # ten steps are too few to average over sampling
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={-1 if short else 20}",
        f"trainer.val_before_train={not short}",
        f"trainer.save_freq={steps}",
    ]


async def run(config: Any, folder: Path) -> dict[str, Any]:
    """Train, and inspect the train workers and what was synced."""
    published: list[int] = []
    pack = PolicyGroup.pack_weights

    async def counted(self: PolicyGroup) -> AsyncGenerator[Any, None]:
        published.append(0)
        async for bucket in pack(self):
            published[-1] += bucket.size
            yield bucket

    PolicyGroup.pack_weights = counted  # type: ignore[method-assign]
    async with build_trainer(config, Console()) as loop:
        await loop.fit()
        policy: Any = loop.task.policy
        asked = [actor.__ray_call__.remote(examined, str(folder / "model")) for actor in policy.actors]
        results = (await asyncio.gather(*asked))[0]
        results["logprobs"] = await policy.compute_logprobs(PROBE)
    whole = results.pop("model_bytes")
    return results | {
        "bytes_a_publish": max(published),
        "publishes": len(published),
        "model_bytes": whole,
        "published_share": round(max(published) / whole, 4),
    }


def examined(worker: Any, path: str) -> dict[str, Any]:
    """Compare base weights and reference on every rank with the files and a fresh model."""
    from verl.training.fsdp.engine import FsdpEngine
    from verl.training.fsdp.settings import FsdpSettings

    actor, files = worker._policy.actor, load_file(Path(path, "model.safetensors"))
    base = {name: tensor.clone() for name, tensor in actor.base_weights()}
    plain = FsdpEngine(FsdpSettings(path, trainable=False))
    tokens = torch.tensor(PROBE)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    batch = FlatBatch(tokens.flatten(), torch.arange(len(PROBE) + 1) * tokens.shape[1], mask.flatten())
    current, reference, right = (engine.forward([batch])[0] for engine in (actor, worker._policy.reference, plain))
    trained = sum(tensor.numel() for _, tensor in actor.adapter_weights())
    return {
        "parameters": sum(tensor.numel() for tensor in base.values()),
        "trained": trained,
        "trained_share": round(trained / sum(tensor.numel() for tensor in base.values()), 4),
        "model_bytes": sum(tensor.nbytes for tensor in base.values()),
        "base_unchanged": base.keys() == files.keys() and all(torch.equal(base[name], files[name]) for name in files),
        "reference_is_base": torch.equal(reference.logprobs, right.logprobs)
        and torch.equal(reference.entropy, right.entropy),
        "moved": round(float((current.logprobs - right.logprobs).abs().max()), 3),
    }


def exported(folder: Path, logprobs: list[list[float]]) -> dict[str, Any]:
    """Load the checkpoint as others do: merged, and as an adapter of its base model."""
    [actor] = folder.glob("run/global_step_*/actor")
    held = sum(path.stat().st_size for path in actor.glob("*.safetensors"))
    for name, more in (("merged", []), ("adapter", ["--adapter"])):
        command = [sys.executable, "-m", "verl", "merge", "--local_dir", actor, "--target_dir", folder / name, *more]
        subprocess.run(command, check=True)
    torch.save(torch.tensor(PROBE), folder / "tokens.pt")
    arguments = [folder / name for name in ("model", "adapter", "merged", "tokens.pt", "found.pt")]
    subprocess.run([sys.executable, "-c", STRANGER, *arguments], check=True, cwd=folder)
    gaps = [float((each - torch.tensor(logprobs)).abs().max()) for each in torch.load(folder / "found.pt")]
    return {"exported_gap": max(gaps), "checkpoint_bytes": held}


if __name__ == "__main__":
    main()
