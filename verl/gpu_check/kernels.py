"""The kernels that runs use, against the same written out, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from transformers import PreTrainedConfig

from verl.algorithms.objective import sft
from verl.data.flat_batch import FlatBatch
from verl.gpu_check.stage import Checks, Context
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.fsdp.shared_prompts import find_shared_prompts
from verl.training.kernels.attention import activate_flash_attention, attend_packed, packing_kwargs
from verl.training.kernels.logprobs import LastLayer, compiled_kernels, token_logprobs
from verl.training.process_group import close_process_group, init_process_group
from verl.training.tensors import parse_dtype

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest |difference| as a share of the largest value: some rounding errors of the dtype."""
LENGTHS = (1, 7, 64, 64, 129, 300)


@dataclass(frozen=True)
class AttentionCase:
    """Heads of queries and of keys, their size, and the window."""

    heads: int
    key_heads: int
    size: int
    window: int | None = None


CASES = (AttentionCase(4, 4, 64), AttentionCase(8, 2, 128), AttentionCase(4, 1, 64, window=33))


def check_attention(context: Context, checks: Checks) -> None:
    """Check packed attention, which is variable-length attention on accelerators, against plain attention."""
    dtype = torch.bfloat16 if context.device == "cuda" else torch.float32  # the kernel has no float32
    random = torch.Generator().manual_seed(0)
    worst = dict.fromkeys(("forward", "dq", "dk", "dv", "shared prompts"), 0.0)
    for case in CASES:
        activate_flash_attention(context.device, PreTrainedConfig.from_dict({"head_dim": case.size}))
        total = sum(LENGTHS)
        shapes = [(total, heads, case.size) for heads in (case.heads, case.key_heads, case.key_heads, case.heads)]
        *qkv, gradient = (torch.randn(shape, generator=random) for shape in shapes)
        found = _differentiate(
            qkv, gradient, context.device, dtype, packing_kwargs(LENGTHS, context.device), case.window
        )
        expected = _differentiate_plainly(qkv, gradient, dtype, LENGTHS, case.window)
        for name, left, right in zip(worst, found, expected, strict=False):
            worst[name] = max(worst[name], _distance(left, right))
        if case.window is None:
            worst["shared prompts"] = max(worst["shared prompts"], _compare_shared(case, context.device, dtype, random))
    for name, value in worst.items():
        checks.at_most(name, value, LIMITS[dtype], f"attention in {dtype}, {name}, differs from plain attention")
    kernel = f"torch's variable-length kernel, {current_flash_attention_impl() or 'FA2'}"
    checks.notes.append(kernel if context.device == "cuda" else "by runs of equal lengths")


def _differentiate(
    qkv: Sequence[Tensor],
    gradient: Tensor,
    device: str,
    dtype: torch.dtype,
    packing: Mapping[str, Any],
    window: int | None,
) -> list[Tensor]:
    """Return the output of packed attention and the gradients of its inputs, [T, heads, D] each."""
    inputs = [each.to(device, dtype).requires_grad_() for each in qkv]
    output = attend_packed(*inputs, window=window, **packing)
    return [output, *torch.autograd.grad(output, inputs, gradient.to(device, dtype))]


def _differentiate_plainly(
    qkv: Sequence[Tensor], gradient: Tensor, dtype: torch.dtype, lengths: Sequence[int], window: int | None
) -> list[Tensor]:
    """Return the same in float64 on the CPU, one sequence at a time, from inputs rounded to `dtype`."""
    inputs = [each.to(dtype).double().requires_grad_() for each in qkv]
    parts = zip(*(each.split(list(lengths)) for each in inputs), strict=True)
    output = torch.cat([_attend(q, k, v, window) for q, k, v in parts])
    return [output, *torch.autograd.grad(output, inputs, gradient.to(dtype).double())]


def _attend(query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
    """Attention of one sequence, written out."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    distance = torch.arange(len(query))[:, None] - torch.arange(len(key))[None]
    visible = (distance >= 0) & (distance < (window or len(key)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


def _compare_shared(case: AttentionCase, device: str, dtype: torch.dtype, random: torch.Generator) -> float:
    """Return the difference of attention to a shared prompt from whole sequences."""
    prompt, responses = 40, (9, 9, 30)
    tokens = torch.cat([torch.cat([torch.arange(prompt), 100 + torch.arange(length)]) for length in responses])
    offsets = torch.tensor([0, *(prompt + length for length in responses)]).cumsum(0)
    mask = torch.cat([torch.arange(prompt + length) >= prompt for length in responses])
    shared = find_shared_prompts(FlatBatch(tokens, offsets, mask))
    assert shared is not None
    count = len(shared.computed)
    shapes = [(count, heads, case.size) for heads in (case.heads, case.key_heads, case.key_heads)]
    qkv = [torch.randn(shape, generator=random) for shape in shapes]
    found = attend_packed(*(each.to(device, dtype) for each in qkv), **shared.to(device).attention_kwargs())
    whole = [each.to(dtype).double()[shared.rows] for each in qkv]
    lengths = [prompt + length for length in responses]
    parts = zip(*(each.split(lengths) for each in whole), strict=True)
    expected = torch.cat([_attend(q, k, v) for q, k, v in parts])
    return _distance(found.cpu()[shared.rows], expected)


def check_logprobs(context: Context, checks: Checks) -> None:
    """Check compiled log-probs against those of a plain log-softmax, with and without a cap of the logits."""
    dtype = torch.bfloat16 if context.device == "cuda" else torch.float32
    kernels, error = compiled_kernels(torch.device(context.device), dtype)
    checks.require(error is None, f"log-probs cannot be compiled, so runs are slower: {error}")
    worst = dict.fromkeys(("log-probs", "entropy", "d hidden", "d weight"), 0.0)
    for softcap in (None, 5.0):
        random = torch.Generator().manual_seed(0)
        hidden, weight = (torch.randn(size, 96, generator=random).to(dtype) for size in (150, 1000))
        weight, targets = weight / 96**0.5, torch.randint(1000, (150,), generator=random)
        gradients = torch.randn(2, 150, generator=random)
        inputs = [each.to(context.device).requires_grad_() for each in (hidden, weight)]
        layer = LastLayer(inputs[0], inputs[1], softcap=softcap)
        outputs = token_logprobs(layer, targets.to(context.device), temperature=0.7, chunk=64, kernels=kernels)
        found = [*outputs, *torch.autograd.grad(outputs, inputs, list(gradients.to(context.device)))]
        expected = _plain_logprobs(hidden.double(), weight.double(), targets, gradients.double(), softcap, 0.7)
        for name, left, right in zip(worst, found, expected, strict=True):
            worst[name] = max(worst[name], _distance(left, right))
    for name, value in worst.items():
        checks.at_most(name, value, LIMITS[dtype], f"{name} of the compiled kernel differ from a plain log-softmax")


def check_layers(context: Context, checks: Checks) -> None:
    """Check compiled layers of a model, which FSDP has sharded, against plain ones."""
    dtype = "bfloat16" if context.device == "cuda" else "float32"
    settings = FsdpSettings(
        context.get_model(), compute_dtype=dtype, gradient_checkpointing=True, grad_clip=None, device=context.device
    )
    init_process_group(0, 1, "127.0.0.1", 0, context.device)
    try:
        plain, compiled = (_run_layers(replace(settings, compile_layers=on)) for on in (False, True))
    finally:
        close_process_group()
    checks.require(not compiled.notes, "; ".join(compiled.notes))
    limit = LIMITS[parse_dtype(dtype)]
    for name, left, right in zip(("log-probs", "loss", "gradient"), compiled.values, plain.values, strict=True):
        checks.at_most(
            name, _distance(left, right.double()), limit, f"{name} of compiled layers differ from plain ones"
        )


class _LayerResults(NamedTuple):
    """What an engine computes, and its notes."""

    values: tuple[Tensor, ...]
    notes: list[str]


def _run_layers(settings: FsdpSettings) -> _LayerResults:
    """Return log-probs, loss and norm of the gradient of a batch."""
    engine = FsdpEngine(settings)
    random, total = torch.Generator().manual_seed(0), sum(LENGTHS)
    tokens = torch.randint(engine.model.backbone.config.get_text_config().vocab_size, (total,), generator=random)
    batch = FlatBatch(tokens, torch.tensor([0, *LENGTHS]).cumsum(0), torch.zeros(total, dtype=torch.bool))
    batch = batch.with_(mask=batch.positions > 0)
    logprobs = engine.forward([batch])[0].logprobs
    metrics = engine.update([batch], sft)
    loss, norm = (torch.tensor(value) for value in (metrics["train/loss"], metrics["actor/grad_norm"]))
    return _LayerResults((logprobs, loss, norm), engine.notes)


def _plain_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, gradients: Tensor, softcap: float | None, temperature: float
) -> Iterator[Tensor]:
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    all_logprobs = (logits / temperature).log_softmax(-1)
    outputs = [all_logprobs.gather(-1, targets[:, None])[:, 0], -(all_logprobs.exp() * all_logprobs).sum(-1)]
    yield from (each.detach() for each in outputs)
    yield from torch.autograd.grad(outputs, inputs, list(gradients))


def _distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest value; infinite if a value is not finite."""
    difference = (found.detach().cpu().double() - expected.detach()).abs().max() / expected.detach().abs().max()
    return float(difference.nan_to_num(torch.inf, torch.inf))
