"""`verl sft`: supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl.commands.arguments import SETTINGS_HELP
from verl.config.batch_sizes import render_sizes
from verl.config.load import load_sft
from verl.config.schema import SftConfig
from verl.sft.torchrun import adapt_to_torchrun
from verl.tracking.console import Console

HELP = f"""\
usage: verl sft [settings]

Train a model on prompts with responses, or on whole conversations. If trainer.save_freq saves checkpoints, rerun the
command to resume. `verl config --sft` lists the settings.

{SETTINGS_HELP}
example:
  verl sft data.train_files=train.parquet model.path=Qwen/Qwen2.5-0.5B optim.lr=1e-5
"""


def main(argv: Sequence[str]) -> int:
    """Train once per point of the sweep (once without `-m`); return the exit code."""
    argv, is_first = adapt_to_torchrun(argv)
    if not is_first:
        return 0
    points = load_sft(argv)
    with Console().stage("importing libraries", is_logged=False):  # after the settings have been checked
        import verl.sft.builder  # noqa: F401
        from verl.trainer.launcher import run_all

    return run_all(points, _train)


async def _train(config: SftConfig, console: Console, *, origins: Mapping[str, str]) -> int:
    from verl.sft.builder import build_sft_trainer
    from verl.sft.data import check_sft_run
    from verl.trainer.launcher import run

    with console.stage("checking model and data", is_logged=False):
        check_sft_run(config)
    console.banner(render_sizes(config), title="sizes of a step")
    return await run(
        config,
        console,
        lambda config, restarts: build_sft_trainer(config, console, restarts=restarts, origins=origins),
    )
