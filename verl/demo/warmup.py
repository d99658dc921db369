"""From noise to a model that is right two times in five: supervised steps by the project's own training engine.

Reinforcement learning needs answers that are sometimes right. The demo's model starts random, so it first sees sums
with their answers, until its greedy answers to held-out problems reach the target, and no further.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from verl.algorithms.objective import sft
from verl.data.batch import FlatBatch
from verl.demo.assets import read_problems, write_weights
from verl.demo.folder import ANSWER_LENGTH, Assets
from verl.errors import EngineError
from verl.training.fsdp import FsdpEngine, FsdpSettings
from verl.training.group import close_process_group, init_process_group

__all__ = ["WarmUp", "accuracy_of", "encode", "greedy_answers", "supervised_batch", "warm_up"]

_BATCH = 128
_LOSS_WORTH_A_LOOK = 0.6  # above it, accuracy is below 0.2: no use to measure
_LOOK_EVERY = 5
_LOOK_AT = 256


@dataclass(frozen=True, slots=True)
class WarmUp:
    """How it went: greedy accuracy on all held-out problems, and what it took."""

    accuracy: float
    steps: int
    seconds: float


def warm_up(
    folder: str | Path, *, target: float = 0.4, max_steps: int = 600, threads: int = 1, seed: int = 0
) -> WarmUp:
    """Train the model of `folder` in place, on one rank in this process."""
    torch.set_num_threads(threads)
    init_process_group(0, 1, "127.0.0.1", 0)
    try:
        return _warm_up(Assets(Path(folder)), target, max_steps, seed)
    finally:
        close_process_group()


def _warm_up(assets: Assets, target: float, max_steps: int, seed: int) -> WarmUp:
    start = time.perf_counter()
    path = str(assets.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    train, test = (encode(tokenizer, read_problems(file)) for file in (assets.train, assets.test))
    settings = FsdpSettings(path, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, warmup_steps=20, total_steps=max_steps)
    engine = FsdpEngine(settings)
    judge = AutoModelForCausalLM.from_pretrained(path)
    random = torch.Generator().manual_seed(seed)
    loss, step = float("inf"), 0
    for step in range(1, max_steps + 1):
        rows = train[torch.randint(len(train), (_BATCH,), generator=random)]
        now = engine.update([supervised_batch(rows)], sft)["train/loss"]
        loss = now if step == 1 else 0.8 * loss + 0.2 * now
        if step % _LOOK_EVERY == 0 and loss < _LOSS_WORTH_A_LOOK:
            _copy(engine.weights(), judge)
            if accuracy_of(judge, test[:_LOOK_AT]) >= target:
                break
    _copy(engine.weights(), judge)
    write_weights(assets.model, engine.weights())
    return WarmUp(accuracy_of(judge, test), step, time.perf_counter() - start)


def encode(tokenizer: PreTrainedTokenizerBase, problems: Sequence[tuple[str, str]]) -> Tensor:
    """[N, L] tokens: prompt, answer, end. All problems are of one length, so this is a matrix."""
    end = tokenizer.eos_token_id
    return torch.tensor([[*tokenizer.encode(prompt + answer), end] for prompt, answer in problems])


def supervised_batch(rows: Tensor) -> FlatBatch:
    """rows [B, L] laid end to end; the answers are what is trained."""
    count, length = rows.shape
    mask = torch.zeros_like(rows, dtype=torch.bool)
    mask[:, -ANSWER_LENGTH:] = True
    return FlatBatch(rows.flatten(), torch.arange(count + 1) * length, mask.flatten())


@torch.no_grad()
def greedy_answers(model: PreTrainedModel, prompts: Tensor, length: int = ANSWER_LENGTH) -> Tensor:
    """prompts [N, P] -> [N, length]: the likeliest token, again and again. Prompts of one length need no padding."""
    model.eval()
    step, cache, answers = prompts, None, []
    for _ in range(length):
        output = model(input_ids=step, past_key_values=cache, use_cache=True)
        step, cache = output.logits[:, -1].argmax(-1, keepdim=True), output.past_key_values
        answers.append(step)
    return torch.cat(answers, dim=1)


def accuracy_of(model: PreTrainedModel, rows: Tensor) -> float:
    """Share of rows [N, L] whose whole answer, end token included, comes out of greedy decoding."""
    prompts, answers = rows[:, :-ANSWER_LENGTH], rows[:, -ANSWER_LENGTH:]
    return float((greedy_answers(model, prompts) == answers).all(dim=1).float().mean())


def _copy(weights: Iterable[tuple[str, Tensor]], model: PreTrainedModel) -> None:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights:
            parameters.pop(name).copy_(tensor)
    if parameters:
        raise EngineError(f"the training engine gave no weights for {', '.join(parameters)}")
