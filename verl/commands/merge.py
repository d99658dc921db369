"""`python -m verl.model_merger` and `verl merge`: a checkpoint becomes a Hugging Face model, proved equal to it.

merge   writes config, tokenizer and weights into --target_dir, which is complete or not there
test    compares a Hugging Face model with a checkpoint
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl.errors import CheckpointError, VerlError

__all__ = ["HELP", "main"]

HELP = """\
usage: verl merge --local_dir DIR --target_dir DIR [options]
       python -m verl.model_merger merge --backend fsdp --local_dir DIR --target_dir DIR [options]
       python -m verl.model_merger test --backend fsdp --local_dir DIR --test_hf_dir DIR [options]

Convert a checkpoint to a Hugging Face model, or compare a model with a checkpoint. The model is loaded again and
compared with the checkpoint: names, shapes, types, all values, tied weights, and a forward pass.

options:
  --local_dir DIR           checkpoint: .../global_step_N/actor
  --target_dir DIR          folder of the new model; must not exist
  --test_hf_dir DIR         model to compare
  --backend fsdp            engine that wrote the checkpoint
  --hf_model_path MODEL     take config and tokenizer (and the base weights of an adapter) from this model instead of
                            the checkpoint
  --adapter                 write the LoRA adapter of the checkpoint in PEFT format, without merging it
  --is-value-model          critic checkpoint (.../global_step_N/critic): a token classifier with one label
  --tie-word-embedding      the head shares the embedding's weights; read from the config by default
  --use_cpu_initialization  accepted for compatibility; merging never needs an accelerator
  --trust-remote-code       run code that comes with the model

example:
  verl merge --local_dir checkpoints/verl/default/global_step_20/actor --target_dir merged
"""

SAMPLE_TOKENS = 16


def main(argv: Sequence[str]) -> int:
    """Merge or compare; the exit code."""
    options = _options(argv)
    if options.backend == "megatron":
        raise VerlError(
            "--backend megatron: this version writes checkpoints of FSDP only, whatever number of ranks; if the "
            "checkpoint is one of its own, use --backend fsdp"
        )
    source = _source(Path(options.local_dir))
    if options.operation == "test":
        gaps = _compare(source, Path(options.test_hf_dir), options)
        if gaps:
            raise CheckpointError(f"{options.test_hf_dir} is not the model of {source}: {_few(gaps)}")
        sys.stdout.write(f"{options.test_hf_dir} is the model of {source}, to the last bit\n")
        return 0
    files = _merge(source, Path(options.target_dir), options)
    sys.stdout.write(f"wrote {options.target_dir}: {', '.join(files)}; proved equal to {source}\n")
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    arguments = list(argv)
    if not arguments or arguments[0] not in ("merge", "test"):
        arguments.insert(0, "merge")
    parser = _Parser(prog="verl merge", add_help=False)
    parser.add_argument("operation", choices=["merge", "test"])
    parser.add_argument("--backend", default="fsdp", choices=["fsdp", "megatron"])
    parser.add_argument("--local_dir", "--local-dir", required=True)
    parser.add_argument("--target_dir", "--target-dir")
    parser.add_argument("--test_hf_dir", "--test-hf-dir")
    parser.add_argument("--hf_model_path", "--hf-model-path")
    parser.add_argument("--adapter", action="store_true")
    parser.add_argument("--tie-word-embedding", "--tie_word_embedding", action="store_true")
    parser.add_argument("--is-value-model", "--is_value_model", action="store_true")
    parser.add_argument("--use_cpu_initialization", "--use-cpu-initialization", action="store_true")
    parser.add_argument("--trust-remote-code", "--trust_remote_code", action="store_true")
    options = parser.parse_args(arguments)
    wanted = "target_dir" if options.operation == "merge" else "test_hf_dir"
    if getattr(options, wanted) is None:
        raise VerlError(f"verl merge: name --{wanted} as well (see `verl merge --help`)")
    if options.adapter and options.is_value_model:
        raise VerlError("verl merge: --adapter is for policies; a critic's head is no part of one, merge it whole")
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise VerlError(f"verl merge: {message} (see `verl merge --help`)")


def _source(path: Path) -> Path:
    """The folder of shards that was meant, whole; what is wrong with it is said with the path that is right."""
    from verl.checkpoint.format import METADATA
    from verl.checkpoint.manifest import find_corruption

    if not path.is_dir():  # as settings take it, too
        path = Path(re.sub(r"global_steps_(\d+)", r"global_step_\1", str(path)))
    if not path.is_dir():
        raise CheckpointError(f"--local_dir {path}: there is no such directory; {_nearby(path)}")
    if not (path / METADATA).is_file():
        inside = [each for each in ("actor", "critic") if (path / each / METADATA).is_file()]
        hint = f"; name {path / inside[0]}" if inside else f": {METADATA} is missing"
        raise CheckpointError(f"--local_dir {path}: is no folder of shards, such as .../global_step_20/actor{hint}")
    step = path.resolve().parent
    if damage := find_corruption(step):
        raise CheckpointError(f"checkpoint {step} is damaged, and nothing was merged: {_few(damage)}")
    return path


def _nearby(path: Path) -> str:
    folder = next((parent for parent in path.parents if parent.is_dir()), Path())
    there = sorted(each.name for each in folder.iterdir() if each.is_dir())[:6]
    return f"{folder} has {', '.join(there) or 'no directories'}"


def _merge(source: Path, target: Path, options: argparse.Namespace) -> list[str]:
    """Written beside the target and proved there; the last act is its name."""
    from verl.checkpoint.export import export_weights
    from verl.checkpoint.files import replace, write

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"--target_dir {target}: is there already, and not empty; name another, or move it away")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"--target_dir {target}: cannot be written: {error}") from error
    try:
        if options.adapter:
            _write_adapter(source, draft, options)
        else:
            for name, data in _small_files(source, options).items():
                write(draft / name, data)
            config = _config(draft, options)
            if options.is_value_model:
                config.save_pretrained(draft)
            export_weights(_weights(source, config, options), draft)
        if gaps := _compare(source, draft, options):
            raise CheckpointError(f"what was written is not what {source} holds, and was taken away: {_few(gaps)}")
        draft.chmod(0o755)
        if target.exists():
            target.rmdir()
        replace(draft, target)
    except OSError as error:
        raise CheckpointError(f"--target_dir {target}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sorted(path.name for path in target.iterdir())


def _weights(source: Path, config: Any, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The weights of a checkpoint as `from_pretrained` finds them; an adapter merged into those below it."""
    from verl.training.model_files import read_saved_weights

    return read_saved_weights(source, config, base=_base(options), **_kind(options))


def _kind(options: argparse.Namespace) -> dict[str, Any]:
    head = "value" if options.is_value_model else "tokens"
    return {"head": head, "trust_remote_code": options.trust_remote_code}


def _base(options: argparse.Namespace) -> Any:
    from verl.training.model_files import base_weights_reader

    return base_weights_reader(path=options.hf_model_path, **_kind(options))


def _adapter(source: Path, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration and the tensors of the adapter that a checkpoint holds, as PEFT names them."""
    from verl.checkpoint.adapter import peft_name, read_saved_adapter
    from verl.checkpoint.format import read_tensors
    from verl.training.model_files import check_fingerprint

    saved = read_saved_adapter(source)
    if saved is None:
        raise CheckpointError(f"--adapter: {source} holds all weights and no adapter; leave the option out")
    base = options.hf_model_path or saved.base
    check_fingerprint(saved, base)
    tensors = {peft_name(name): tensor for name, tensor in read_tensors(source, prefix="model.")}
    return saved.config | {"base_model_name_or_path": base}, tensors


def _write_adapter(source: Path, folder: Path, options: argparse.Namespace) -> None:
    from verl.checkpoint.adapter import write_adapter

    write_adapter(folder, *_adapter(source, options))


def _adapter_gaps(source: Path, folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """The adapter as PEFT loads it, against the checkpoint: every tensor, and none too many."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from verl.checkpoint.adapter import is_adapter, peft_name

    disable_progress_bar()
    config, expected = _adapter(source, options)
    base = AutoModelForCausalLM.from_pretrained(
        config["base_model_name_or_path"], dtype="auto", trust_remote_code=options.trust_remote_code
    )
    try:
        model = PeftModel.from_pretrained(base, str(folder))
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        yield f"it cannot be loaded: {error}"
        return
    loaded = model.get_base_model().named_parameters()
    found = {peft_name(name): parameter.detach() for name, parameter in loaded if is_adapter(name)}
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            yield f"{name} is missing"
        elif name not in expected:
            yield f"{name} is too many"
        elif not torch.equal(found[name], expected[name]):
            yield f"{name} has other numbers"
    written: Any = model.peft_config["default"]
    scale = written.lora_alpha / written.r
    if scale != config["lora_alpha"] / config["r"]:
        yield f"it is scaled by {scale:g}, {config['lora_alpha'] / config['r']:g} is right"


def _small_files(source: Path, options: argparse.Namespace) -> dict[str, bytes]:
    """Config and tokenizer: those that were saved along, which lie with the actor, or of the model that is named."""
    if options.hf_model_path is not None:
        from verl.training.model_files import read_model_files

        return read_model_files(options.hf_model_path, trust_remote_code=options.trust_remote_code)
    for folder in (source / "huggingface", source.resolve().parent / "actor" / "huggingface"):
        if (folder / "config.json").is_file():
            small = [path for path in folder.iterdir() if path.is_file() and not _is_weights(path.name)]
            return {path.name: path.read_bytes() for path in small}
    raise CheckpointError(f"checkpoint {source}: has no huggingface/config.json; name the model by --hf_model_path")


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".pkl"))


def _config(folder: Path, options: argparse.Namespace) -> Any:
    from transformers import AutoConfig, AutoModelForTokenClassification

    from verl.model_safety import model_problems
    from verl.training.model_files import weight_format

    for problem in model_problems(str(folder), trust_remote_code=options.trust_remote_code):
        raise CheckpointError(problem)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: config.json cannot be used: {error}") from error
    if options.tie_word_embedding and not weight_format(config)["tied"]:
        raise CheckpointError(
            "--tie-word-embedding: the model's config.json says tie_word_embeddings=false, and its head was trained by "
            "itself; leave the option out"
        )
    if options.is_value_model:
        kind: Any = AutoModelForTokenClassification._model_mapping[type(config)]
        config.architectures, config.num_labels, config.tie_word_embeddings = [kind.__name__], 1, False
    return config


def _compare(source: Path, folder: Path, options: argparse.Namespace) -> list[str]:
    """How the model in `folder` differs from the checkpoint, in words; empty: not at all."""
    from verl.checkpoint.export import compare_weights

    if options.adapter:
        return [*_adapter_gaps(source, folder, options)]
    config = _config(folder, options)
    gaps = compare_weights(_weights(source, config, options), folder)
    return gaps or [*_forward_gaps(source, folder, config, options)]


def _forward_gaps(source: Path, folder: Path, config: Any, options: argparse.Namespace) -> Iterator[str]:
    """The model as others load it, against one that is filled from the shards: the same numbers for a few tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
    from transformers.utils.logging import disable_progress_bar

    from verl.checkpoint.export import iter_checkpoint_weights
    from verl.training.model_files import weight_format

    disable_progress_bar()
    kind: Any = AutoModelForTokenClassification if options.is_value_model else AutoModelForCausalLM
    arguments = {"trust_remote_code": options.trust_remote_code, "attn_implementation": "eager"}
    tokens = torch.arange(SAMPLE_TOKENS)[None] * 7919 % config.get_text_config().vocab_size
    try:
        loaded, told = kind.from_pretrained(folder, dtype="auto", output_loading_info=True, **arguments)
    except (OSError, ValueError, RuntimeError) as error:
        yield f"it cannot be loaded: {error}"
        return
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if told[what]:
            yield f"from_pretrained found {what.replace('_', ' ')}: {', '.join(map(str, sorted(told[what])[:3]))}"
    form, head = weight_format(config), loaded.get_output_embeddings()
    if head is not None and form["tied"] != (head.weight is loaded.get_input_embeddings().weight):
        yield f"the head is {'not ' * form['tied']}the embedding, against tie_word_embeddings in the config"
    with torch.no_grad():
        found = loaded.eval()(tokens).logits
        del loaded
        filled = kind.from_config(config, dtype=form["dtype"], **arguments)
        weights = dict(iter_checkpoint_weights(source, base=_base(options), **form))  # by the names inside of the model
        filled.load_state_dict(weights, strict=False, assign=True)
        filled.tie_weights()
        right = filled.eval()(tokens).logits
    if not torch.equal(found, right):
        yield f"a forward pass gives other logits, {float((found.double() - right.double()).abs().max()):.3g} apart"


def _few(gaps: Sequence[str]) -> str:
    more = f", and {len(gaps) - 3} more" if len(gaps) > 3 else ""
    return "; ".join(gaps[:3]) + more
