"""The demo's run: create a tiny model, warm it up, train it as `verl train` does, and report."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from verl.config.batch_sizes import render_sizes
from verl.config.features import syncs_adapter_only
from verl.config.load import LoadedConfig, load
from verl.config.schema import Config
from verl.demo.folder import RESPONSE_LENGTH, Assets
from verl.demo.report import Example, describe_next, read_metrics, render_report
from verl.tracking.console import Console


def load_settings(folder: Path, steps: int, overrides: Sequence[str]) -> LoadedConfig:
    """Return the settings of the demo's run, with the user's overrides."""
    settings = [*demo_settings(Assets(folder), steps), *overrides]
    [loaded] = load(settings)
    # An engine that loads the model would read it while it is still being created.
    if syncs_adapter_only(loaded.config, loaded.config.trainer.device):
        [loaded] = load([*settings, "actor_rollout_ref.rollout.lora_transport=merged"])
    return loaded


def demo_settings(assets: Assets, steps: int) -> list[str]:
    """Return the settings of a GRPO run of laptop size, as `verl train` takes them."""
    return [
        f"data.train_files={assets.train}",
        f"data.val_files={assets.test}",
        "data.train_batch_size=64",
        "data.max_prompt_length=8",
        f"data.max_response_length={RESPONSE_LENGTH}",
        f"actor_rollout_ref.model.path={assets.model}",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=256",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "actor_rollout_ref.rollout.n=8",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",  # one train rank and one engine start fastest on few cores
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=10",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={assets.folder / 'run'}",
    ]


async def run_demo(folder: Path, loaded: LoadedConfig, console: Console) -> None:
    """Create the files, warm the model up, train it, and print a report."""
    from verl.cluster.session import connect
    from verl.trainer.build.preflight import check_rl_run
    from verl.trainer.launcher import with_free_folder

    console.note(f"creating a model with 0.6 million parameters and addition problems in {folder}/")
    creation = asyncio.create_task(asyncio.to_thread(_create_assets, folder))
    await asyncio.sleep(0)  # the thread imports torch and creates the model while Ray starts
    with console.stage("creating the model and starting Ray", is_logged=False):
        if note := connect(loaded.config.ray_kwargs.ray_init.arguments()):
            console.note(note)
        assets = await creation
    console.hints(loaded.hints)
    config = with_free_folder(loaded.config, console.note)
    console.banner(render_sizes(config), title="sizes of a step")
    with console.stage("checking models, data and the reward function", is_logged=False):
        await check_rl_run(config)
    await _train(config, assets, console)
    with console.stage("generating responses of both models", is_logged=False):
        examples = _generate_examples(assets, folder / "trained")
    console.banner(render_report(read_metrics(config.trainer.checkpoint_dir), examples), title="results")
    console.note(describe_next(assets, folder / "trained", config.trainer.checkpoint_dir))


def _create_assets(folder: Path) -> Assets:
    from verl.demo.assets import make_assets

    return make_assets(folder)


async def _train(config: Config, assets: Assets, console: Console) -> None:
    """Train as `verl train` does; the model is warmed up while the rollout engine starts."""
    import torch

    from verl.demo.assets import write_weights
    from verl.demo.warmup import warm_up
    from verl.trainer.build.rl_builder import build_trainer
    from verl.weights.bucket import unpack

    console.note("warming the model up with supervised steps, while the other processes start")
    progress = ["step 0"]
    warmup = asyncio.create_task(asyncio.to_thread(warm_up, assets.folder, report=progress.append))

    async def wait_for_warmup() -> None:
        with console.stage("warming up", lambda: progress[-1], is_logged=False):
            result = await warmup
        console.note(
            f"warmed up in {result.steps} steps, {result.seconds:.0f} s: {result.accuracy:.0%} of held-out sums correct"
        )

    async with build_trainer(config, console, model_ready=wait_for_warmup) as loop:
        await loop.fit()
        shutil.copytree(assets.model, assets.folder / "trained", dirs_exist_ok=True)
        weights: dict[str, torch.Tensor] = {}
        async for bucket in loop.task.policy.pack_weights():
            weights |= unpack(bucket.slots, torch.from_numpy(bucket.data.copy()))
        write_weights(assets.folder / "trained", weights.items())


def _generate_examples(assets: Assets, trained: Path) -> list[Example]:
    """Return responses of both models to all held-out problems, generated with transformers as a check of vLLM."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl.demo.assets import read_problems
    from verl.demo.warmup import encode, generate_greedy

    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    problems = read_problems(assets.test)
    prompts = encode(tokenizer, problems)[:, :-RESPONSE_LENGTH]
    before, after = (
        tokenizer.batch_decode(
            generate_greedy(AutoModelForCausalLM.from_pretrained(path), prompts), skip_special_tokens=True
        )
        for path in (assets.model, trained)
    )
    return [Example(*problem, old, new) for problem, old, new in zip(problems, before, after, strict=True)]
