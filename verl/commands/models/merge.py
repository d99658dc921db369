"""`verl merge`: convert a checkpoint to a Hugging Face model, and verify that both are equal."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.checkpoint.files import replace
from verl.checkpoint.locate import find_shards
from verl.checkpoint.manifest import METADATA, CheckpointDir, find_corruption
from verl.checkpoint.model_card import CARD, check_upload, render_model_card, upload_model
from verl.commands.arguments import ArgumentParser
from verl.errors import CheckpointError, list_some
from verl.tracking.console import Console

if TYPE_CHECKING:
    from verl.commands.models.checkpoint_model import CheckpointModel

HELP = """\
usage: verl merge DIR --target_dir DIR [options]
       python -m verl.model_merger merge --backend fsdp --local_dir DIR --target_dir DIR [options]
       python -m verl.model_merger test --backend fsdp --local_dir DIR --test_hf_dir DIR [options]

Convert a checkpoint to a Hugging Face model, or compare a model with a checkpoint. The model is loaded again and
compared with the checkpoint: names, shapes, types, all values, tied weights, and a forward pass. A model card
(README.md) says where it comes from.

options:
  DIR, --local_dir DIR      folder of a run (its newest checkpoint), a checkpoint, or .../global_step_N/actor
  --target_dir DIR          folder of the new model; must not exist
  --test_hf_dir DIR         model to compare
  --backend NAME            fsdp or megatron: both write the same checkpoints, so it has no effect
  --hf_model_path MODEL     take config and tokenizer (and the base weights of an adapter) from this model instead of
                            the checkpoint
  --adapter                 write the LoRA adapter of the checkpoint in PEFT format, without merging it
  --is-value-model          critic checkpoint (.../global_step_N/critic): a token classifier with one label
  --tie-word-embedding      the head shares the embedding's weights; read from the config by default
  --use_cpu_initialization  accepted for compatibility; merging never needs an accelerator
  --hf_upload_path REPO     upload the new model to this repository of the Hugging Face Hub (USER/NAME)
  --private                 create that repository as a private one
  --trust-remote-code       run code that comes with the model

example:
  verl merge checkpoints/verl/default --target_dir merged
"""

_FLAGS = ("private", "adapter", "tie_word_embedding", "is_value_model", "use_cpu_initialization", "trust_remote_code")


def main(argv: Sequence[str]) -> int:
    """Convert or compare; return the exit code."""
    options = _read_options(argv)
    if options.hf_upload_path:
        check_upload(options.hf_upload_path)
    path = _find_checkpoint(Path(options.local_dir), "critic" if options.is_value_model else "actor")

    with Console().stage("merging and verifying", is_logged=False):
        return _run(options, path)


def _run(options: argparse.Namespace, path: Path) -> int:
    from verl.commands.models.checkpoint_model import CheckpointModel

    checkpoint = CheckpointModel(
        path,
        base_path=options.hf_model_path,
        is_adapter=options.adapter,
        is_value_model=options.is_value_model,
        must_be_tied=options.tie_word_embedding,
        trust_remote_code=options.trust_remote_code,
    )
    if options.operation == "test":
        if differences := checkpoint.compare(Path(options.test_hf_dir)):
            raise CheckpointError(f"{options.test_hf_dir} differs from {path}: {list_some(differences)}")
        sys.stdout.write(f"{options.test_hf_dir} is identical to {path}\n")
        return 0
    target = Path(options.target_dir)
    files = _write_model(checkpoint, target)
    sys.stdout.write(f"wrote {target}: {', '.join(files)}; verified against {path}\n")
    if options.hf_upload_path:
        url = upload_model(target, options.hf_upload_path, private=options.private)
        sys.stdout.write(f"uploaded to {url}\n")
    return 0


def _read_options(argv: Sequence[str]) -> argparse.Namespace:
    arguments = list(argv)
    if not arguments or arguments[0] not in ("merge", "test"):
        arguments.insert(0, "merge")
    parser = ArgumentParser("verl merge", allow_abbrev=True)
    parser.add_argument("operation", choices=["merge", "test"])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--backend", default="fsdp", choices=["fsdp", "megatron"])
    for name in ("local_dir", "target_dir", "test_hf_dir", "hf_model_path", "hf_upload_path"):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    for name in _FLAGS:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", action="store_true")
    options = parser.parse_args(arguments)
    options.local_dir = options.local_dir or options.folder
    if options.local_dir is None:
        parser.error("name the folder of a run or a checkpoint, such as `verl merge checkpoints/verl/default`")
    required = "target_dir" if options.operation == "merge" else "test_hf_dir"
    if getattr(options, required) is None:
        parser.error(f"--{required} is required")
    if options.adapter and options.is_value_model:
        parser.error("--adapter is not supported for critics: a PEFT adapter has no value head; remove the option")
    if options.hf_upload_path and options.operation == "test":
        parser.error("--hf_upload_path uploads the model that merge writes; remove the option")
    if options.private and not options.hf_upload_path:
        parser.error("--private is for --hf_upload_path; give both, or none")
    return options


def _find_checkpoint(path: Path, model: str) -> Path:
    """Return the folder of shards of `model`, after verifying its checksums."""
    if not path.is_dir():  # the other spelling, which settings accept too
        path = Path(re.sub(r"global_steps_(\d+)", r"global_step_\1", str(path)))
    if not path.is_dir():
        folder = next((parent for parent in path.parents if parent.is_dir()), Path())
        names = sorted(each.name for each in folder.iterdir() if each.is_dir())[:6]
        raise CheckpointError(
            f"--local_dir {path}: no such directory; {folder} has {', '.join(names) or 'no directories'}"
        )
    if (shards := find_shards(path, model)) is None:
        raise CheckpointError(
            f"--local_dir {path}: not the folder of a run or a checkpoint of the {model}, such as .../global_step_20: "
            f"{METADATA} is missing"
        )
    step = shards.resolve().parent
    if shards.parent != path and shards != path:
        steps = ", ".join(map(str, CheckpointDir(step.parent).steps()))
        sys.stdout.write(f"merging {shards}, the newest checkpoint (steps with one: {steps})\n")
    if corruption := find_corruption(step):
        raise CheckpointError(f"checkpoint {step} is corrupt, nothing was merged: {list_some(corruption)}")
    return shards


def _write_model(checkpoint: CheckpointModel, target: Path) -> list[str]:
    """Write the model to a temporary folder, verify it there, and rename it to `target`; return its files."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"--target_dir {target}: already exists and is not empty; choose another, or move it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"--target_dir {target}: cannot be written: {error}") from error
    try:
        checkpoint.write(draft)
        if differences := checkpoint.compare(draft):
            raise CheckpointError(
                f"the written model differs from {checkpoint.path} and was removed: {list_some(differences)}"
            )
        card = render_model_card(
            checkpoint.path,
            is_adapter=checkpoint.is_adapter,
            is_value_model=checkpoint.is_value_model,
            base=checkpoint.base_path,
        )
        (draft / CARD).write_text(card, encoding="utf-8")
        draft.chmod(0o755)
        if target.exists():
            target.rmdir()
        replace(draft, target)
    except OSError as error:
        raise CheckpointError(f"--target_dir {target}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sorted(path.name for path in target.iterdir())
