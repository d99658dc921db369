"""The tables of docs/engines.md: what each engine supports, as it declares itself. `--write` updates the page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from verl.config.rollout_engines import PARALLEL_SIZES, RolloutEngineSpec, get_rollout_engine
from verl.config.train_engines import Capability, get_train_engine

PAGE = Path(__file__).parents[1] / "docs" / "engines.md"
MARKS = {
    "training": ("<!-- training engines: written by `make docs` -->\n", "<!-- end of the training engines -->\n"),
    "rollout": ("<!-- rollout engines: written by `make docs` -->\n", "<!-- end of the rollout engines -->\n"),
}
TRAIN_ENGINES, ROLLOUT_ENGINES = ("fsdp2", "megatron"), ("vllm", "sglang", "hf")
TITLES: dict[Capability, str] = {
    "adapters": "[LoRA](lora.md)",
    "value_head": "critics",
    "exact_kl": "exact KL over the whole vocabulary",
    "squared_probs": "sums of squared probabilities (optimal token baseline)",
    "many_ranks": "several train ranks",
    "sequence_parallel": "ranks that share sequences by `ulysses_sequence_parallel_size`",
    "expert_parallel": "experts distributed over ranks",
    "replicas": "several sharded copies of the model (`fsdp_size`)",
    "routing": "routing replay and load balancing of MoE models",
    "sampling_mask": "log-probs over the sampled part of the vocabulary (`keep_sampling_mask`)",
    "shared_prompts": "prompts computed once per group (`use_prefix_grouper`)",
    "offload": "weights and optimizer in host memory while they are idle",
    "bfloat16_weights": "master weights in bfloat16",
    "stochastic_rounding": "stochastic rounding",
    "bfloat16": "computation in bfloat16",
    "float16": "computation in float16",
    "adamw_8bit": "`optim.name=adamw_8bit`",
    "muon": "`optim.name=muon`",
}


def render_training() -> str:
    """Return the table of training engines."""
    engines = [get_train_engine(name) for name in TRAIN_ENGINES]
    rows = [("", *(f"`strategy={each.name}`" for each in engines))]
    rows += [(TITLES[what], *(_say(what in each.capabilities) for each in engines)) for what in get_args(Capability)]
    rows.append(("without a GPU", *(_say(not each.needs_accelerators) for each in engines)))
    return _format(rows)


def render_rollout() -> str:
    """Return the table of rollout engines."""
    engines = [get_rollout_engine(name) for name in ROLLOUT_ENGINES]
    rows = [("", *(f"`name={each.name}`" for each in engines))]
    rows += [(f"`{name}`", *(_describe_size(each, name) for each in engines)) for name in PARALLEL_SIZES]
    rows.append(("`quantization`", *(_describe_size(each, "quantization") for each in engines)))
    can = [each.capabilities for each in engines]
    rows += [
        ("requests go on with new weights", *(_say(each.continues_requests) for each in can)),
        (
            "log-probs with `top_p` and `top_k`",
            *("truncated" if each.has_truncated_logprobs else "full" for each in can),
        ),
        ("`keep_sampling_mask`", *(_say(each.returns_sampling_mask) for each in can)),
        ("`router_replay.mode=R3`", *(_say(each.returns_routed_experts) for each in can)),
        ("`trainer.deterministic=true`", *(_join(each.deterministic_devices) for each in can)),
        ("`weight_transport`", *(_join(("host", *each.device_transports)) for each in can)),
        ("adapters sent alone", *(f"up to rank {each.max_lora_rank}" if each.max_lora_rank else "no" for each in can)),
        ("reward models", *(_say(each.reward_model is not None) for each in engines)),
    ]
    return _format(rows)


def replace_tables(page: str) -> str:
    """Return the page with the tables of today."""
    for name, render in (("training", render_training), ("rollout", render_rollout)):
        begin, end = MARKS[name]
        head, rest = page.split(begin)
        page = f"{head}{begin}\n{render()}\n{end}{rest.split(end)[1]}"
    return page


def _describe_size(engine: RolloutEngineSpec, name: str) -> str:
    if name not in engine.capabilities.settings:
        return "no"
    return "on GPUs" if name in engine.capabilities.accelerator_settings else "yes"


def _say(is_supported: bool) -> str:
    return "yes" if is_supported else "no"


def _join(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "no"


def _format(rows: list[tuple[str, ...]]) -> str:
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{' --- |' * len(rows[0])}", *others]) + "\n"


if __name__ == "__main__":
    text = replace_tables(PAGE.read_text(encoding="utf-8"))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
