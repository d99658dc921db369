"""What `make show-diagnosis` runs: a small run, or a simulated one, for each rule, and healthy runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from verl.cli import main
from verl.config.batch_sizes import BatchSizes
from verl.data.plan import Planner
from verl.demo.assets import make_tokenizer
from verl.demo.folder import Assets
from verl.demo.run import demo_settings
from verl.tracking.throughput import Throughput
from verl.types import SampleHandle
from verl.workers.rank_speed import compare_ranks, time_matrix_product

REWARDS = Path(__file__).with_name("_diagnosis_rewards.py")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LR, WARM_UP = f"{ACTOR}.optim.lr", f"{ACTOR}.optim.lr_warmup_steps"
NO_STD = "algorithm.norm_adv_by_std_in_grpo=False"
IN_PROCESS = [
    *(f"{ROLLOUT}.name=hf", "trainer.local=True", "trainer.deterministic=True"),
    *("trainer.n_gpus_per_node=1", "trainer.save_freq=-1", "trainer.resume_mode=disable"),
    "trainer.samples.per_step=0",
]
PREEMPTED, TIMES_SLOWER, LEAK_GIB = 4, 3.0, 0.02  # in the simulated runs


@dataclass(frozen=True)
class Provocation:
    """A run that a rule has to notice. Prompts of 2 groups of 4 responses of up to 4 tokens, unless `settings` differ.

    `ends` chooses the model: one that ends its responses early, or one that nearly never does.
    """

    rule: str
    how: str
    steps: int
    reward: str = "noise"
    settings: tuple[str, ...] = ()
    ends: bool = False
    is_long: bool = False  # for the full form only: the short one simulates it


PROVOCATIONS = (
    Provocation(
        *("degenerate-responses", "greedy responses of a random model", 3),
        settings=(f"{ROLLOUT}.temperature=0.05", "data.max_response_length=72"),
    ),
    Provocation(
        *("length-explosion", "only an entropy bonus, which unlearns the end token", 30, "constant"),
        settings=(f"{LR}=3e-4", f"{ACTOR}.entropy_coeff=1", "data.max_response_length=64"),
        ends=True,
    ),
    Provocation("gradient-drift", "rewards that grow at every call", 46, "growing", (f"{LR}=1e-5", NO_STD)),
    Provocation(
        *("entropy-collapse", "learning from noise at a learning rate that rises to 0.3", 26),
        settings=(f"{LR}=0.3", f"{WARM_UP}=12"),
    ),
    Provocation(
        *("reward-hacking", "a reward that wants the opposite of the validation", 8, "exploitable"),
        settings=(f"{LR}=0.02", "data.train_batch_size=4", "data.val_max_samples=16", "trainer.test_freq=1"),
    ),
    Provocation(
        *("reward-outlier", "a reward of 10,000 among 512", 1, "spike"),
        settings=("data.train_batch_size=64", f"{ROLLOUT}.n=8", "data.max_response_length=1"),
    ),
    Provocation("no-signal", "a constant reward", 1, "constant"),
    Provocation("truncated-responses", "a model that does not end its responses", 1),
    Provocation(
        *("scoring-errors", "a reward that raises at every eighth call", 3, "raising"),
        settings=("reward.max_failure_rate=0.5",),
    ),
    Provocation("engine-mismatch", "top_p without keep_sampling_mask", 1, settings=(f"{ROLLOUT}.top_p=0.5",)),
    Provocation("kl-explosion", "a learning rate of 1", 2, settings=(f"{LR}=1", f"{ACTOR}.use_kl_loss=True")),
    Provocation("skipped-steps", "rewards so large that gradients overflow", 1, "huge", (NO_STD,)),
    Provocation(
        *("unscored-episodes", "an agent that never stops asking", 1, ""),
        settings=(
            f"{ROLLOUT}.multi_turn.enable=True",
            f"{ROLLOUT}.agent.default_agent_loop={REWARDS}:talkative_agent",
        ),
    ),
    Provocation("memory-growth", "a reward that keeps 4 MiB of every response", 84, "leaking", is_long=True),
)


def make_models(folder: Path) -> None:
    """Write two models of one layer, and the prompts of the demo as conversations."""
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    for name in ("endless", "ending"):
        torch.manual_seed(0)
        config.tie_word_embeddings = name == "endless"
        model = AutoModelForCausalLM.from_config(config)
        if name == "ending":  # one number of all hidden states is large, and makes the end token likely
            with torch.no_grad():
                model.model.embed_tokens.weight[:, 0] = 3.0
                model.lm_head.weight[tokenizer.eos_token_id, 0] = 1.3
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [
        {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}
        for row in pq.read_table(Assets(folder).train).slice(0, 64).to_pylist()
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "conversations.parquet")


def provoke(case: Provocation, folder: Path) -> int:
    """Train a small model in this process; return the exit code. Output goes to a file next to the run."""
    assets, is_agent = Assets(folder), not case.reward
    settings = [
        f"data.train_files={folder / 'conversations.parquet' if is_agent else assets.train}",
        f"actor_rollout_ref.model.path={folder / ('ending' if case.ends else 'endless')}",
        *("data.train_batch_size=2", f"{ROLLOUT}.n=4"),
        *("data.max_prompt_length=8", "data.max_response_length=4"),
        f"trainer.total_training_steps={case.steps}",
        f"trainer.default_local_dir={folder / case.rule}",
    ]
    if "trainer.test_freq=1" in case.settings:
        settings.append(f"data.val_files={assets.test}")
    if not is_agent:
        settings.append(f"reward.custom_reward_function.path={REWARDS}")
        settings.append(f"reward.custom_reward_function.name={case.reward}")
    return train([*settings, *case.settings], folder / f"{case.rule}.txt")


def train_healthy(seed: int, folder: Path, steps: int, *, is_short: bool) -> int:
    """Train as `verl demo` does, in this process and with fewer prompts in a step; return the exit code."""
    settings = [
        *demo_settings(Assets(folder), steps),
        *("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8", f"{LR}=1e-4"),
        *(f"trainer.seed={seed}", f"data.seed={seed}", "data.val_max_samples=256"),
        f"trainer.default_local_dir={folder / f'healthy-{seed}'}",
    ]
    if is_short:  # its model is hardly warmed up: whole answers are never correct
        settings += [
            "data.train_batch_size=4",
            f"{ACTOR}.ppo_mini_batch_size=4",
            "data.val_max_samples=32",
        ]
        settings += [f"reward.custom_reward_function.path={REWARDS}", "reward.custom_reward_function.name=digits"]
    return train(settings, folder / f"healthy-{seed}.txt")


def train(settings: list[str], log: Path) -> int:
    # Later settings replace earlier ones, which `verl train` refuses.
    last = {setting.partition("=")[0]: setting for setting in [*settings, *IN_PROCESS]}
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        return main(["train", *last.values()])


def simulate_waiting(*, gen_s: float, idle_s: float) -> Iterator[Mapping[str, float]]:
    """A run with engines on devices of their own."""
    throughput = Throughput(devices=1, rollout_devices=1, is_asynchronous=True, has_own_engines=True)
    times = {"timing_s/step": 10.0, "timing_s/gen": gen_s, "timing_s/prepare": 1.0, "timing_s/update": 10.0 - gen_s}
    yield throughput.measure(
        {"plan/tokens": 1000.0, "plan/generated_tokens": 800.0, "plan/samples": 8.0}, times, idle_s
    )


def simulate_slow_rank() -> Iterator[Mapping[str, float]]:
    """Four ranks whose speed is really measured, of which the third is slower."""
    for _ in range(12):
        seconds = time_matrix_product("cpu")
        yield compare_ranks([seconds, seconds, TIMES_SLOWER * seconds, seconds])


def simulate_preemption() -> Iterator[Mapping[str, float]]:
    """Steps of 8 responses, some of which the engine has preempted."""
    for step in range(3):
        handles = [
            SampleHandle(k, k // 4, 20, 10, float(k % 2), step, preemptions=int(k < PREEMPTED)) for k in range(8)
        ]
        yield Planner(1, BatchSizes(8, None, 80)).plan(handles).metrics


def simulate_leak() -> Iterator[Mapping[str, float]]:
    for step in range(90):
        yield {"perf/controller_rss_gib": 1.0 + LEAK_GIB * step}


SIMULATIONS: dict[str, tuple[str, Callable[[], Iterator[Mapping[str, float]]]]] = {
    "idle-trainer": ("generation takes 6 of 10 s", lambda: simulate_waiting(gen_s=6.0, idle_s=0.0)),
    "idle-generation": ("no response runs for 6 of 10 s", lambda: simulate_waiting(gen_s=0.5, idle_s=6.0)),
    "slow-rank": (f"one of four ranks is {TIMES_SLOWER:g} times slower", simulate_slow_rank),
    "kv-preemption": (f"{PREEMPTED} of 8 responses are preempted", simulate_preemption),
    "memory-growth": (f"{LEAK_GIB * 1024:.0f} MiB more in every step", simulate_leak),
}
"""How rules are provoked that need many devices, a full engine, or many steps: (what happens, the metrics by step)."""
