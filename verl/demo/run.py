"""The demo's run: create a tiny model, warm it up, train it by `verl train`'s own path, and report."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.config.batch_sizes import derive_sizes, render_sizes
from verl.config.features import syncs_adapter_only
from verl.config.load import LoadedConfig, load
from verl.demo.folder import ANSWER_LENGTH, Assets
from verl.demo.report import Example, read_metrics, report
from verl.tracking.console import Console
from verl.weights.sync import Source

if TYPE_CHECKING:  # torch and transformers are imported in a thread, while Ray starts
    import torch

__all__ = ["demo_settings", "load_settings", "run_demo"]


def load_settings(folder: Path, steps: int, overrides: Sequence[str]) -> LoadedConfig:
    """Return the settings of the demo's run, with the user's overrides."""
    settings = [*demo_settings(Assets(folder), steps), *overrides]
    [loaded] = load(settings)
    if syncs_adapter_only(loaded.config):  # the model is still being created when the engines would read it
        [loaded] = load([*settings, "actor_rollout_ref.rollout.lora_transport=merged"])
    return loaded


def demo_settings(assets: Assets, steps: int) -> list[str]:
    """Group-relative policy optimisation at the size of a laptop: the settings that `verl train` would be given."""
    return [
        f"data.train_files={assets.train}",
        f"data.val_files={assets.test}",
        "data.train_batch_size=64",
        "data.max_prompt_length=8",
        f"data.max_response_length={ANSWER_LENGTH}",
        f"actor_rollout_ref.model.path={assets.model}",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=256",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "actor_rollout_ref.rollout.n=8",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",  # one train rank and one engine: the quickest start where cores are few
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=10",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={assets.folder / 'run'}",
    ]


async def run_demo(folder: Path, loaded: LoadedConfig, console: Console) -> None:
    from verl.cluster.session import connect

    console.note(f"making a model of 0.6 million parameters and its problems in {folder}/")
    making = asyncio.create_task(asyncio.to_thread(_make, folder))
    await asyncio.sleep(0)  # the thread imports torch and makes the model, while this one waits for Ray
    if told := connect(loaded.config.ray_kwargs.ray_init.arguments()):
        console.note(told)
    assets = await making
    console.hints(loaded.hints)
    console.banner(render_sizes(derive_sizes(loaded.config)), title="sizes of a step")
    await _reinforce(loaded, assets, console)
    examples = _examples(assets, folder / "trained")
    console.banner(report(read_metrics(loaded.config.trainer.checkpoint_dir), examples), title="what it learned")
    console.note(f"the trained model is in {folder / 'trained'}: an ordinary Hugging Face folder")


def _make(folder: Path) -> Assets:
    from verl.demo.assets import make_assets

    return make_assets(folder)


async def _reinforce(loaded: LoadedConfig, assets: Assets, console: Console) -> None:
    """Train by the same way as `verl train`; the model is warmed up while the rollout engine starts."""
    from verl.demo.assets import write_weights
    from verl.demo.warmup import warm_up
    from verl.trainer.builder.rl_builder import build_trainer

    console.note("warming it up by supervised steps, while the other processes start")
    warming = asyncio.create_task(asyncio.to_thread(warm_up, assets.folder))

    async def warmed() -> None:
        done = await warming
        console.note(f"warm: {done.accuracy:.0%} of held-out sums right after {done.steps} steps, {done.seconds:.0f} s")

    async with build_trainer(loaded.config, console, model_ready=warmed) as loop:
        await loop.fit()
        shutil.copytree(assets.model, assets.folder / "trained", dirs_exist_ok=True)
        policy = loop.task.policy
        write_weights(assets.folder / "trained", [item async for item in _weights_of(policy)])  # type: ignore[arg-type]


async def _weights_of(source: Source) -> AsyncIterator[tuple[str, torch.Tensor]]:
    import torch

    from verl.weights.bucket import unpack

    for reference in await source.pack_weights():
        bucket = await reference
        for name, tensor in unpack(bucket.slots, torch.from_numpy(bucket.data.copy())):
            yield name, tensor


def _examples(assets: Assets, trained: Path, count: int = 6) -> list[Example]:
    """The first held-out problems, answered by both models with transformers: a second pair of eyes beside vLLM."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl.demo.assets import read_problems
    from verl.demo.warmup import encode, greedy_answers

    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    problems = read_problems(assets.test)[:count]
    prompts = encode(tokenizer, problems)[:, :-ANSWER_LENGTH]
    before, after = (
        tokenizer.batch_decode(
            greedy_answers(AutoModelForCausalLM.from_pretrained(path), prompts), skip_special_tokens=True
        )
        for path in (assets.model, trained)
    )
    return [Example(*problem, old, new) for problem, old, new in zip(problems, before, after, strict=True)]
