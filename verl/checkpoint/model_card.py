"""The model card of an exported model, and its upload to the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

from verl.checkpoint.manifest import TRAINER
from verl.errors import VerlError

CARD = "README.md"
_TITLES = {"train": "reinforcement learning", "sft": "supervised fine-tuning"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def render_model_card(checkpoint: Path, *, is_adapter: bool, is_value_model: bool, base: str | None = None) -> str:
    """Return the card: metadata for the hub, where the model comes from, and how to load it. Local paths are omitted.

    Args:
        checkpoint: The folder of shards: .../global_step_N/actor.
        is_adapter: Whether the model is an adapter in PEFT format.
        is_value_model: Whether the model is a critic.
        base: The model that training started from; by default, the one that the checkpoint records.
    """
    step = checkpoint.resolve().parent
    run = _read_run(step)
    model = base or run.get("model", "")
    hub_model = model if _HUB_NAME.fullmatch(model) and not Path(model).exists() else None
    how = _TITLES.get(run.get("command", ""), "training")
    kind = "LoRA adapter" if is_adapter else "critic" if is_value_model else "model"
    metadata = [
        f"library_name: {'peft' if is_adapter else 'transformers'}",
        *([f"base_model: {hub_model}"] if hub_model else []),
        f"pipeline_tag: {'token-classification' if is_value_model else 'text-generation'}",
        "tags:",
        *(f"- {tag}" for tag in ("verl", how.replace(" ", "-")) if tag != "training"),
    ]
    origin = f"[{hub_model}](https://huggingface.co/{hub_model})" if hub_model else "a local model"
    number = step.name.removeprefix("global_step_")
    lines = [
        "---",
        *metadata,
        "---",
        "",
        f"# {kind[0].upper()}{kind[1:]} trained with verl",
        "",
        f"This {kind} is step {number} of a run of {how} that started from {origin}. It was exported by `verl merge` "
        f"of verl {version('verl')}, which compared it with the checkpoint.",
        "",
        "```python",
        *_list_loading_lines(is_adapter=is_adapter, is_value_model=is_value_model, base=hub_model),
        "```",
        "",
        "Describe here the data, the reward, the evaluation and the license.",
    ]
    return "\n".join(lines) + "\n"


def _list_loading_lines(*, is_adapter: bool, is_value_model: bool, base: str | None) -> list[str]:
    if is_adapter:
        first = f'AutoModelForCausalLM.from_pretrained("{base or "BASE_MODEL"}")'
        return [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            "",
            f'model = PeftModel.from_pretrained({first}, "THIS_REPOSITORY")',
        ]
    name = "AutoModelForTokenClassification" if is_value_model else "AutoModelForCausalLM"
    return [
        f"from transformers import {name}, AutoTokenizer",
        "",
        f'model = {name}.from_pretrained("THIS_REPOSITORY", dtype="auto")',
        'tokenizer = AutoTokenizer.from_pretrained("THIS_REPOSITORY")',
    ]


def _read_run(step: Path) -> dict[str, str]:
    """Return the command and the model that a checkpoint records; old ones record none."""
    try:
        return dict(json.loads((step / TRAINER).read_bytes()).get("run") or {})
    except (OSError, ValueError):
        return {}


def check_upload(repository: str) -> None:
    """Raise an error if the name of the repository is wrong, or no token is configured."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise VerlError(f"--hf_upload_path {repository}: {error}; write USER/NAME") from error
    if get_token() is None:
        raise VerlError(f"--hf_upload_path {repository}: no token; run `hf auth login`, or set HF_TOKEN")


def upload_model(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a folder to a model repository, which is created if it does not exist; return its address."""
    import httpx
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repository, private=private or None, repo_type="model", exist_ok=True)
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=folder,
            repo_type="model",
            commit_message="Upload a model trained with verl",
        )
    except (OSError, httpx.HTTPError) as error:  # the hub's own errors are OSErrors
        raise VerlError(
            f"--hf_upload_path {repository}: the upload failed: {error}; the model is complete in {folder}: upload it "
            f"with `hf upload {repository} {folder}`"
        ) from error
    return str(url)
