"""Responses are scored while others are still generated: with a reward as slow as generation, a step is hardly longer.

`verl train` with real engines that write a few responses at once, and a reward of a given duration: nothing at
first; then as much that the scoring processes are busy as long as generation lasted. Waiting for scored responses may
then take 1.25 times as long; one after the other it would take 2. `--pool` measures the pool alone instead, with a
stand-in for the engine, for plain, async and batched functions. `--short` (CI) is a run of two steps with rewards that
take as long as generation: every response is scored, and no time is held.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from _common import finish, metrics_of, sized_for_addition, train

from verl.demo.assets import make_assets
from verl.rewards.pool.pool import RewardPool
from verl.rewards.result import Scored
from verl.rewards.settings import RewardFunctionSettings

BOUND = 1.25
SLOTS = 8
SECONDS = 0.25
PLAIN = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, seconds=SECONDS):\n"
PLAIN += "    time.sleep(seconds)\n    return 1.0\n"
ASYNC = f"async {PLAIN}".replace("time.sleep", "await asyncio.sleep")
BATCH = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
BATCH += "    time.sleep(SECONDS)\n    return [1.0] * len(solution_strs)\n"
KINDS = {"plain": (PLAIN, SLOTS, None), "async": (ASYNC, 1, None), "batch": (BATCH, 2, SLOTS)}
"""Name -> (function, processes, size of a batch)."""
PROMPTS, RESPONSES_PER_PROMPT, STEPS = 16, 8, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pool", action="store_true", help="the pool alone, with a stand-in for the engine")
    parser.add_argument("--short", action="store_true", help="two steps, or a third of the responses of --pool")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="verl-overlap-") as folder:
        if options.pool:
            of_the_pool(Path(folder), 64 if options.short else 192)
        of_a_run(Path(folder), short=options.short)


def of_a_run(folder: Path, *, short: bool) -> None:
    make_assets(folder)
    written(folder, "plain", PLAIN)
    if short:
        seconds = seconds_to_responses(folder, "short", reward_s=0.05, steps=2)
        finish("reward_overlap", True, answers=PROMPTS * RESPONSES_PER_PROMPT, with_reward_s=round(seconds, 2))
    alone = seconds_to_responses(folder, "alone", reward_s=0.0)
    reward_s = alone * SLOTS / (PROMPTS * RESPONSES_PER_PROMPT)  # of a response: all of them take as long again
    both = seconds_to_responses(folder, "both", reward_s)
    finish(
        "reward_overlap",
        both / alone <= BOUND,
        answers=PROMPTS * RESPONSES_PER_PROMPT,
        generation_s=round(alone, 2),
        with_reward_s=round(both, 2),
        reward_of_an_answer_s=round(reward_s, 3),
        step_over_generation=round(both / alone, 3),
        bound=BOUND,
    )


def seconds_to_responses(folder: Path, name: str, reward_s: float, steps: int = STEPS) -> float:
    """How long a step waits for its responses and their scores: the median over the steps but the first."""
    code, _ = train(
        *sized_for_addition(folder),
        f"data.train_batch_size={PROMPTS}",
        "data.max_response_length=64",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={RESPONSES_PER_PROMPT}",
        f"actor_rollout_ref.rollout.max_num_seqs={SLOTS}",
        f"reward.custom_reward_function.path={folder / 'plain.py'}",
        f"reward.custom_reward_function.reward_kwargs.seconds={reward_s}",
        "reward.reward_manager.name=prime",
        f"reward.num_workers={SLOTS}",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=False",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder / name}",
        deadline_s=900,
    )
    if code != 0:
        finish("reward_overlap", False, failed=name, exit_code=code)
    lines = [line for line in metrics_of(folder / name) if "reward/mean" in line]
    if len(lines) != steps or any(line["reward/error_rate"] or line["reward/timeout_rate"] for line in lines):
        finish("reward_overlap", False, failed=name, reason="a step is missing, or a response was not scored")
    return statistics.median(line["timing_s/gen"] for line in lines[1:])


def of_the_pool(folder: Path, answers: int) -> None:
    ratios = {}
    for kind, (function, workers, batch_size) in KINDS.items():
        file = written(folder, kind, function)
        settings = RewardFunctionSettings(str(file), batch_size=batch_size, workers=workers, timeout_s=60)
        with RewardPool(settings) as pool:
            alone, step, after = asyncio.run(measure(pool, answers))
        ratios[kind] = round(step / alone, 3)
        print(f"{kind}: generation {alone:.2f} s, step {step:.2f} s, one after the other {after:.2f} s")
    finish("reward_overlap", max(ratios.values()) <= BOUND, answers=answers, step_over_generation=ratios, bound=BOUND)


def written(folder: Path, kind: str, function: str) -> Path:
    file = folder / f"{kind}.py"
    file.write_text(f"import asyncio, time\nSECONDS = {SECONDS}\n{function}")
    return file


async def measure(pool: RewardPool, answers: int) -> tuple[float, float, float]:
    """(generation alone, the step, generation and then the reward)."""
    await pool.start()
    await asyncio.gather(*(pool.score("show", "warm", "") for _ in range(SLOTS)))
    slots = asyncio.Semaphore(SLOTS)

    async def generate() -> None:
        async with slots:
            await asyncio.sleep(SECONDS)

    async def episode() -> None:
        await generate()
        assert await pool.score("show", "written", "") == Scored(1.0)

    start = time.monotonic()
    await asyncio.gather(*(generate() for _ in range(answers)))
    alone = time.monotonic() - start
    await asyncio.gather(*(episode() for _ in range(answers)))
    step = time.monotonic() - start - alone
    await asyncio.gather(*(generate() for _ in range(answers)))
    await asyncio.gather(*(pool.score("show", "written", "") for _ in range(answers)))
    return alone, step, time.monotonic() - start - alone - step


if __name__ == "__main__":
    main()
