"""Trainer and engine agree on every sampled token; and a weight sync that is skipped stops the run.

Over 10 consecutive training steps in float32, with tied and with untied embeddings, the largest
|trainer log-prob - engine log-prob| of any sampled token must be <= 1e-4. Then the same run with engines that claim to
have loaded new weights and did not: the probe must end it. `--short` (CI) takes 3 steps of the tied model.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _common import REWARDS, finish, metrics_of, sized_for_addition, train

from verl.config.load import load
from verl.demo.assets import make_assets
from verl.errors import WeightSyncError
from verl.rollout.engine import load_weights
from verl.tracking.console import Console
from verl.trainer.build.rl_builder import build_trainer
from verl.weights.sync import HostTransport, Receiver, Source

LIMIT = 1e-4
METRIC = "training/rollout_logprobs_diff_max"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    steps = 3 if options.short else 10
    gaps, tokens = {}, 0
    with tempfile.TemporaryDirectory(prefix="verl-parity-") as directory:
        for kind in ("tied",) if options.short else ("tied", "untied"):
            folder = Path(directory, kind)
            make_assets(folder, tied=kind == "tied")
            code, _ = train(*settings(folder, steps), deadline_s=1800)
            lines = [line for line in metrics_of(folder / "run") if METRIC in line] if code == 0 else []
            if len(lines) != steps:
                finish("parity", False, failed=kind, exit_code=code)
            gaps[kind] = max(line[METRIC] for line in lines)
            tokens += sum(round(line["response_length/mean"] * line["plan/samples"]) for line in lines)
        message = asyncio.run(run_with_skipped_sync(settings(Path(directory, "tied"), steps)))
    print(f"with a weight sync skipped: {message}")
    stopped = "does not hold version 1 of the weights" in message and "still has version 0" in message
    figures = {f"largest_gap_{kind}": gap for kind, gap in gaps.items()}
    finish(
        "parity",
        all(gap <= LIMIT for gap in gaps.values()) and stopped,
        steps=steps,
        tokens=tokens,
        **figures,
        allowed=LIMIT,
        skipped_sync_stopped=stopped,
    )


async def run_with_skipped_sync(overrides: list[str]) -> str:
    """The same run, but from version 1 on the engines get a new version number but no weights; returns the error."""
    send = HostTransport.send

    async def skip(self: HostTransport, source: Source, receivers: Sequence[Receiver], version: int) -> list[Any]:
        if version == 0:
            return list(await send(self, source, receivers, version))
        return await asyncio.gather(*(load_weights(receiver, [], version) for receiver in receivers))

    HostTransport.send = skip  # type: ignore[method-assign]
    try:
        [loaded] = load(overrides)
        async with build_trainer(loaded.config, Console()) as loop:
            await loop.fit()
    except WeightSyncError as error:
        return str(error)
    finally:
        HostTransport.send = send  # type: ignore[method-assign]
    return "the run went on"


def settings(folder: Path, steps: int) -> list[str]:
    return [
        *sized_for_addition(folder),
        "data.train_batch_size=32",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.rollout.n=8",
        "data.max_response_length=8",
        f"reward.custom_reward_function.path={REWARDS}",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=False",
    ]


if __name__ == "__main__":
    main()
