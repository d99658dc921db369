"""A GRPO step next to its bare parts: vLLM's `LLM.generate` and a plain FSDP2 update of the same lengths.

make show-step [ARGS=--short]

One engine with a core of its own and one train rank with one thread, in the run and outside of it. After every step of
the run the bare parts repeat it, so that all see the same machine; figures are medians over the steps. A small model
with random weights writes 128 tokens each ("uniform") or stops at random, after 80 on average and 512 at most
("long-tailed"). Held: rollout and update at least 0.95 as fast as bare, the step at most 1.08 of the bare sum.
`--short` (CI) takes small steps, and holds only that both did the same work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from _common import REWARDS, finish  # isort: skip - puts tests/ on the path
import torch
from _plots import draw_bars
from recording_console import RecordingConsole
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.config.load import load
from verl.data.plan import Plan, Planner
from verl.demo.assets import make_assets, make_tokenizer
from verl.trainer.build.rl_builder import build_trainer
from verl.types import SampleHandle

RATE, SUM = 0.95, 1.08
WARM_UP = 2  # steps
RESPONSES = 8


@dataclass(frozen=True)
class Case:
    """A model by the mean length of its responses (None: always the longest), and the size of a step."""

    mean: float | None
    longest: int
    prompts: int
    steps: int


CASES = {"uniform": Case(None, 128, 16, 9), "long-tailed": Case(80.0, 512, 16, 9)}
SHORT = {"uniform": Case(None, 16, 2, 1), "long-tailed": Case(8.0, 32, 2, 1)}


def make_model(folder: Path, mean: float | None) -> None:
    """Write a random model that ends a response with the same probability at every token.

    One dimension of its hidden states is constant, because no layer writes to it; only the logit of the end reads it.
    """
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "max_position_embeddings": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(vocab_size=len(tokenizer), tie_word_embeddings=False, dtype="float32", **sizes, **heads, **ids)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        head = model.lm_head.weight
        head[:, 0], head[tokenizer.eos_token_id] = 0.0, 0.0
        states = model.model(torch.arange(2, 66)[None]).last_hidden_state[0]
        others = float((states @ head.T).exp().sum(-1).mean()) - 1.0
        logit = -50.0 if mean is None else math.log(others / (mean - 1.0))
        head[tokenizer.eos_token_id, 0] = logit / float(states[:, 0].mean())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Part:
    """A process that does one task for each line on its standard input, and answers with a line of JSON."""

    def __init__(self, command: Sequence[str], **environment: str) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ) | environment
        )

    def wait(self) -> None:
        """Wait until it is ready."""
        while self._read() != "ready":
            pass

    def run(self, task: Any) -> Any:
        """Return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def close(self) -> None:
        """End its input, at which it ends itself and what it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended")
        return line.strip()


def start_bare(kind: str, model: Path, longest: int) -> Part:
    script = Path(__file__).with_name("_bare_step.py")
    command = [sys.executable, str(script), kind, str(model), str(longest)]
    vllm = {"VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return Part(command, OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1", **vllm)


class RecordingPlanner:
    """A planner that remembers the samples of the last step."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self.handles: list[SampleHandle] = []

    def plan(self, handles: Sequence[SampleHandle]) -> Plan:
        self.handles = list(handles)
        return self._planner.plan(handles)


def settings(folder: Path, case: Case, ranks: int = 1) -> list[str]:
    assets = folder / "assets"
    return [
        f"data.train_files={assets / 'train.parquet'}",
        f"data.train_batch_size={case.prompts}",
        "data.max_prompt_length=8",
        f"data.max_response_length={case.longest}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"actor_rollout_ref.rollout.n={RESPONSES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={case.prompts}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        "actor_rollout_ref.actor.optim.lr=1e-9",
        "algorithm.rollout_correction.bypass_mode=true",
        f"reward.custom_reward_function.path={REWARDS}",
        f"trainer.n_gpus_per_node={ranks}",
        "trainer.total_training_steps=1000",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={folder / 'run'}",
    ]


async def measure(folder: Path, case: Case) -> dict[str, float]:
    """Return the medians of a case: rates of rollout and update against bare, and the step by the bare sum."""
    make_model(folder / "model", case.mean)
    make_assets(folder / "assets")
    longest = 8 + case.longest
    bare = {kind: start_bare(kind, folder / "model", longest) for kind in ("generation", "update")}
    rounds: list[dict[str, float]] = []
    try:
        [loaded] = load(settings(folder, case))
        for part in bare.values():
            part.wait()
        async with build_trainer(loaded.config, RecordingConsole()) as loop:
            task = loop.task
            planner = task.planner = RecordingPlanner(task.planner)  # type: ignore[assignment]
            await task.begin(0)
            for version in range(WARM_UP + case.steps):
                metrics = await task.step(version)
                times = compare(metrics, bare, planner.handles)
                if version >= WARM_UP:
                    rounds.append(times)
                    print({name: round(value, 3) for name, value in times.items()}, flush=True)
    finally:
        for part in bare.values():
            part.close()
    return {name: round(median(each[name] for each in rounds), 3) for name in rounds[0]}


def compare(metrics: Any, bare: dict[str, Part], handles: Sequence[SampleHandle]) -> dict[str, float]:
    """Repeat a step with the bare parts."""
    prompts = {
        handle.group: random.Random(handle.group).choices(range(2, 250), k=handle.prompt_tokens) for handle in handles
    }
    generation = bare["generation"].run([[prompts[handle.group], handle.generated] for handle in handles])
    update = bare["update"].run([[handle.prompt_tokens, handle.tokens] for handle in handles])
    step = metrics["timing_s/step"]
    return {
        "rollout": generation / metrics["timing_s/gen"],
        "update": update / metrics["timing_s/update"],
        "step": step / (generation + update),
        "seconds": step,
        "gen_s": metrics["timing_s/gen"],
        "update_s": metrics["timing_s/update"],
        "sync_s": metrics["timing_s/sync"],
        "tokens": float(sum(handle.generated for handle in handles)),
        "longest": float(max(handle.generated for handle in handles)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--plot", type=Path, help="SVG file to draw the figures in")
    options = parser.parse_args()
    short = options.short
    cases, figures = SHORT if short else CASES, {}
    for name, case in cases.items():
        with tempfile.TemporaryDirectory(prefix="verl-step-") as folder:
            figures[name] = asyncio.run(measure(Path(folder), case))
            print(name, figures[name], flush=True)
    uniform = cases["uniform"]
    passed = figures["uniform"]["tokens"] == uniform.prompts * RESPONSES * uniform.longest
    if not short:
        passed &= all(each["rollout"] >= RATE and each["update"] >= RATE for each in figures.values())
        passed &= all(each["step"] <= SUM for each in figures.values())
    if options.plot:
        rows = [
            (f"{part}, {name} lengths", case[part], True)
            for name, case in figures.items()
            for part in ("rollout", "update")
        ]
        draw_bars(options.plot, "Rollout and update next to the bare engines", rows, "of the bare speed")
    finish("step", passed, cases=figures, bounds={"rollout": RATE, "update": RATE, "step": SUM})


if __name__ == "__main__":
    main()
