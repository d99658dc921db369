"""A killed asynchronous run trains on every prompt once, those that take long included.

make show-async-resume [ARGS="--kills 30"]

A run with `trainer.max_staleness=2`, Ray and vLLM, in which the reward of one prompt in four takes as long as several
steps. It saves after every second step, and is killed (SIGKILL) at random moments with episodes in flight: mostly the
controller, which is started again, sometimes an engine. Held at the end: `verl audit` proves from the run's folder that
every position of the data was trained once, no response was too old, and every checkpoint and every resume continued
with exactly the positions that were not done; the trained positions are all from the first to the last, so that slow
prompts are as frequent among them as in the data; some steps trained responses of older weights.

`--short`: 2 kills, of the controller, with transformers instead of vLLM.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

from _common import finish  # isort: skip - puts tests/ on the path
from _killed_run import BATCH, KilledRun
from _uneven_rewards import is_long

from verl.commands.runs.audit import audit_run
from verl.demo.assets import make_assets

STALENESS = 2
REWARDS = Path(__file__).with_name("_uneven_rewards.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--kills", type=int)
    parser.add_argument(
        "--seed", type=int, help="of the moments; a new one each time, in the short form always the same"
    )
    options = parser.parse_args()
    wanted = options.kills or (2 if options.short else 30)
    seed = options.seed if options.seed is not None else 3 if options.short else random.randrange(10**6)
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory(prefix="verl-async-resume-") as directory:
        folder = Path(directory)
        assets = make_assets(folder)
        run = KilledRun(
            folder / "killed",
            10 if options.short else 4 * wanted,
            wanted,
            random.Random(seed),
            f"reward.custom_reward_function.path={REWARDS}",
            engine="hf" if options.short else "vllm",
            max_staleness=STALENESS,
            kills_engines=not options.short,
        )
        code = run.play()
        audit = audit_run(run.folder)
        trained = list_trained(run.folder)
        slow = [is_long(truth) for truth in read_truths(assets.train)]
    is_complete = sorted(trained) == list(range(run.steps * BATCH))
    finish(
        "async_resume",
        code == 0 and not audit.problems and is_complete and run.kills >= wanted and max(audit.staleness) > 0,
        seed=seed,
        kills=run.kills,
        resumes=run.resumes,
        engines_killed=run.engines_killed,
        exit_code=code,
        steps=audit.steps,
        trained=audit.trained,
        missing=sorted(set(range(run.steps * BATCH)) - set(trained))[:10],
        staleness=dict(sorted(audit.staleness.items())),
        allowed=STALENESS,
        checkpoints_compared=audit.checkpoints,
        problems=audit.problems[:5],
        slow_in_the_data=round(sum(slow) / len(slow), 3),
    )


def list_trained(folder: Path) -> list[int]:
    records = [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]
    return [position for record in records for position, *_ in record.get("trained", [])]


def read_truths(path: Path) -> list[str]:
    import pyarrow.parquet as parquet

    return [row["ground_truth"] for row in parquet.read_table(path)["reward_model"].to_pylist()]


if __name__ == "__main__":
    main()
