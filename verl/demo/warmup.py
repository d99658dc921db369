"""From noise to a model that is right two times in five: supervised training, in this process.

Reinforcement learning needs answers that are sometimes right. The demo's model starts random, so it first sees sums
with their answers, until its greedy answers to held-out problems reach the target, and no further. The steps are those
of `verl sft`; only when to stop is the demo's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from verl.data.plan import MicroBatchLimit
from verl.data.samplers import CustomSampler
from verl.demo.assets import read_problems, write_weights
from verl.demo.folder import ANSWER_LENGTH, Assets
from verl.errors import EngineError
from verl.sft.batches import split_batch
from verl.sft.data import SFTDataLoader
from verl.sft.examples import pair_example
from verl.sft.model import SFTModel
from verl.training.fsdp import FsdpEngine, FsdpSettings
from verl.training.process_group import close_process_group, init_process_group

__all__ = ["WarmUp", "accuracy_of", "encode", "greedy_answers", "warm_up"]

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
        return asyncio.run(_warm_up(Assets(Path(folder)), target, max_steps, seed))
    finally:
        close_process_group()


async def _warm_up(assets: Assets, target: float, max_steps: int, seed: int) -> WarmUp:
    start = time.perf_counter()
    path = str(assets.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    problems, test = read_problems(assets.train), encode(tokenizer, read_problems(assets.test))
    examples = [pair_example(tokenizer, prompt, answer, [tokenizer.eos_token_id]) for prompt, answer in problems]
    cut = partial(split_batch, ranks=1, limit=MicroBatchLimit(samples=_BATCH, tokens=None))
    order = CustomSampler(partial(_draw, max_steps * _BATCH), "the demo's", len(examples), seed, lambda name: [])
    feed = SFTDataLoader(examples, order, _BATCH, cut)
    settings = FsdpSettings(path, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, warmup_steps=20, total_steps=max_steps)
    model = SFTModel(FsdpEngine(settings))
    judge = AutoModelForCausalLM.from_pretrained(path)
    loss, step = float("inf"), 0
    for step in range(1, max_steps + 1):
        [rank_batch] = (await feed.take(step - 1)).rank_batches
        now = model.update(rank_batch)["train/loss"]
        loss = now if step == 1 else 0.8 * loss + 0.2 * now
        if step % _LOOK_EVERY == 0 and loss < _LOSS_WORTH_A_LOOK:
            _copy(model.engine.weights(), judge)
            if accuracy_of(judge, test[:_LOOK_AT]) >= target:
                break
    feed.close()
    _copy(model.engine.weights(), judge)
    write_weights(assets.model, model.engine.weights())
    return WarmUp(accuracy_of(judge, test), step, time.perf_counter() - start)


def _draw(count: int, epoch: int, seed: int, rows: int, column: object) -> Sequence[int]:
    """Rows drawn one by one: whoever stops in the middle has seen no part of the problems more than another."""
    return torch.randint(rows, (count,), generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def encode(tokenizer: PreTrainedTokenizerBase, problems: Sequence[tuple[str, str]]) -> Tensor:
    """[N, L] tokens: prompt, answer, end. All problems are of one length, so this is a matrix."""
    end = tokenizer.eos_token_id
    return torch.tensor([[*tokenizer.encode(prompt + answer), end] for prompt, answer in problems])


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
