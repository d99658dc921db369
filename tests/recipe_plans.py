"""Writes the part of docs/performance.md that compares published launch scripts with what `verl plan` proposes.

python tests/recipe_plans.py [--write]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from public_models import MODELS

from verl.config.load import load
from verl.config.paths import change_settings, get_value
from verl.config.schema import Config
from verl.memory_plan.accelerators import DEVICES, GIB
from verl.memory_plan.device_memory import MemoryPlan
from verl.memory_plan.run_plan import get_cluster, get_workload, plan_memory
from verl.memory_plan.step_time import estimate_step
from verl.memory_plan.suggestions import rank_suggestions
from verl.trainer.build.worker_settings import train_settings

PAGE = Path(__file__).parents[1] / "docs/performance.md"
BEGIN, END = "<!-- recipes: written by `make docs` -->\n", "<!-- end of the recipes -->\n"
DEVICE = DEVICES["H100"]
ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout"))
WIDTH, SHARE = f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.gpu_memory_utilization"
OFFLOADS = {
    f"{ACTOR}.fsdp_config.param_offload": "weights",
    f"{ACTOR}.fsdp_config.optimizer_offload": "moments",
    f"{REF}.fsdp_config.param_offload": "reference",
}


@dataclass(frozen=True)
class Recipe:
    """A launch script: its work, and how it shares the devices. Micro-batches are the work's."""

    script: str
    repository: str
    model: str  # one of the same shape
    nodes: int
    work: Sequence[str]
    layout: Mapping[str, Any]


_72B = {WIDTH: 16, SHARE: 0.6, **dict.fromkeys(OFFLOADS, True)}
RECIPES = (
    Recipe(
        "examples/grpo_trainer/run_qwen2-7b.sh",
        "volcengine/verl",
        "Qwen2.5-7B",
        1,
        (
            "algorithm.adv_estimator=grpo",
            "data.train_batch_size=1024",
            "data.max_prompt_length=512",
            "data.max_response_length=1024",
            f"{ACTOR}.ppo_mini_batch_size=256",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=40",
            f"{ACTOR}.use_kl_loss=True",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=40",
            f"{ROLLOUT}.n=5",
            f"{REF}.log_prob_micro_batch_size_per_gpu=40",
        ),
        {WIDTH: 2, SHARE: 0.6, f"{REF}.fsdp_config.param_offload": True},
    ),
    Recipe(
        "examples/ppo_trainer/run_qwen2.5-32b.sh",
        "volcengine/verl",
        "Qwen2.5-32B",
        4,
        (
            "algorithm.adv_estimator=gae",
            "data.train_batch_size=1024",
            "data.max_prompt_length=1024",
            "data.max_response_length=1024",
            f"{ACTOR}.ppo_mini_batch_size=256",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=16",
            "critic.ppo_micro_batch_size_per_gpu=8",
            "critic.model.enable_gradient_checkpointing=False",
        ),
        {WIDTH: 4, SHARE: 0.5},
    ),
    Recipe(
        "examples/tuning/70b/qwen2-70b_grpo_32_h800_fsdp_vllm.sh",
        "volcengine/verl",
        "Qwen2.5-72B",
        4,
        (
            "algorithm.adv_estimator=grpo",
            "data.train_batch_size=1024",
            "data.max_prompt_length=512",
            "data.max_response_length=512",
            f"{ACTOR}.ppo_mini_batch_size=256",
            f"{ACTOR}.use_dynamic_bsz=True",
            f"{ACTOR}.ppo_max_token_len_per_gpu=24000",
            f"{ACTOR}.use_kl_loss=True",
            f"{ROLLOUT}.n=5",
        ),
        _72B,
    ),
    Recipe(
        "examples/tuning/scaling/run_qwen2_5_72b_fsdp.sh",
        "verl-project/verl",
        "Qwen2.5-72B",
        4,
        (
            "algorithm.adv_estimator=grpo",
            "data.train_batch_size=1024",
            "data.max_prompt_length=1024",
            "data.max_response_length=2048",
            f"{ACTOR}.ppo_mini_batch_size=256",
            f"{ACTOR}.use_dynamic_bsz=True",
            f"{ACTOR}.ppo_max_token_len_per_gpu=24576",
            f"{ACTOR}.use_kl_loss=True",
            f"{ROLLOUT}.n=5",
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu=24576",
            f"{REF}.log_prob_max_token_len_per_gpu=24576",
        ),
        _72B,
    ),
)


def render_recipes() -> str:
    """Return the table as Markdown."""
    head = (
        "| model, devices | settings | engine | share | offloaded | others | s per step | GiB |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    with tempfile.TemporaryDirectory() as folder:
        return "\n".join([head, *(line for recipe in RECIPES for line in _rows(recipe, Path(folder)))]) + "\n"


def replace_recipes(page: str) -> str:
    """Return the page with the figures of today."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{render_recipes()}\n{END}{rest.split(END)[1]}"


def _rows(recipe: Recipe, folder: Path) -> Iterator[str]:
    """Yield the row of the script, and that of `verl plan` for the same work with the default layout."""
    config = load_work(recipe, folder)
    published = change_settings(config, recipe.layout)
    name = f"{recipe.model}, {8 * recipe.nodes}"
    yield _row(
        name,
        f"`{Path(recipe.script).name}` of {recipe.repository}",
        published,
        plan_memory(published, train_settings),
        {},
    )
    best = rank_suggestions(config, DEVICE, train_settings)[0]
    yield _row("", "`verl plan`", change_settings(config, best.values), best.plan, best.values)


def load_work(recipe: Recipe, folder: Path) -> Config:
    """Return the settings of a recipe without its layout."""
    file = folder / f"{recipe.model}.json"
    file.write_text(json.dumps(MODELS[recipe.model]))
    given = [f"actor_rollout_ref.model.path={file}", f"trainer.nnodes={recipe.nodes}", "trainer.n_gpus_per_node=8"]
    (loaded,) = load([*given, *recipe.work], complete=False)
    return loaded.config


def _row(name: str, settings: str, config: Config, plan: MemoryPlan, changes: Mapping[str, Any]) -> str:
    offloaded = ", ".join(what for key, what in OFFLOADS.items() if get_value(config, key)) or "-"
    known = {WIDTH, SHARE, *OFFLOADS}
    others = ", ".join(
        f"`{key.removeprefix('actor_rollout_ref.')}={changes[key]}`" for key in changes if key not in known
    )
    seconds = estimate_step(plan, get_cluster(config, DEVICE), get_workload(config))
    gib = f"{plan.peak(DEVICE.memory) / GIB:.0f}" + (", does not fit" if plan.problems(DEVICE.memory) else "")
    cells = (name, settings, get_value(config, WIDTH), get_value(config, SHARE), offloaded, others or "-")
    return f"| {' | '.join(map(str, cells))} | {seconds:,.0f} | {gib} |"


if __name__ == "__main__":
    text = replace_recipes(PAGE.read_text(encoding="utf-8"))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(render_recipes())
