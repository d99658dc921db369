"""Supervised warm-up of the demo's model, in this process, until it solves about two of five problems.

Reinforcement learning needs responses that are sometimes correct, and the demo's model is initialized randomly. The
steps are those of `verl sft`, until greedy responses to held-out problems reach the target accuracy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from verl.data.micro_batches import MicroBatchLimit
from verl.demo.assets import read_problems, write_weights
from verl.demo.folder import RESPONSE_LENGTH, Assets
from verl.errors import EngineError
from verl.sft.examples import pair_example
from verl.sft.model import SFTModel
from verl.sft.trainer import split_batch
from verl.training.process_group import close_process_group, init_process_group
from verl.training.registry import build_engine, get_settings_class
from verl.training.settings import Optimizer, Schedule

_BATCH = 128
_MEASURE_BELOW_LOSS = 0.6  # above it, accuracy is below 0.2
_MEASURE_EVERY = 5
_MEASURED_PROBLEMS = 256


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Greedy accuracy on all held-out problems, and the cost of reaching it."""

    accuracy: float
    steps: int
    seconds: float


def warm_up(
    folder: str | Path,
    *,
    target: float = 0.4,
    max_steps: int = 600,
    threads: int = 1,
    seed: int = 0,
    optimizer: Optimizer = "adamw",
    report: Callable[[str], object] = str,
) -> WarmUp:
    """Train the model in `folder` in place, on one rank in this process; `report` gets the progress of each step."""
    torch.set_num_threads(threads)
    start, assets = time.perf_counter(), Assets(Path(folder))
    path = str(assets.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    problems, test = read_problems(assets.train), encode(tokenizer, read_problems(assets.test))
    examples = [pair_example(tokenizer, prompt, answer, [tokenizer.eos_token_id]) for prompt, answer in problems]
    # Rows are drawn independently, so that stopping at any step has seen all problems equally often.
    rows = torch.randint(len(examples), (max_steps, _BATCH), generator=torch.Generator().manual_seed(seed)).tolist()
    schedule = Schedule(3e-3, warmup_steps=20)
    settings = get_settings_class()(path, optimizer=optimizer, schedule=schedule, betas=(0.9, 0.95), weight_decay=0.0)
    init_process_group(0, 1, "127.0.0.1", 0)
    with ExitStack() as closing:
        closing.callback(close_process_group)
        model = SFTModel(build_engine(settings))
        copy = AutoModelForCausalLM.from_pretrained(path)
        loss, step = float("inf"), 0
        for step in range(1, max_steps + 1):
            batch = [examples[row] for row in rows[step - 1]]
            [rank_batch] = split_batch(batch, ranks=1, limit=MicroBatchLimit(samples=_BATCH, tokens=None))
            step_loss = model.update(rank_batch)["train/loss"]
            loss = step_loss if step == 1 else 0.8 * loss + 0.2 * step_loss
            report(f"step {step} of at most {max_steps}, loss {loss:.2f}")
            if step % _MEASURE_EVERY == 0 and loss < _MEASURE_BELOW_LOSS:
                _copy_weights(model.engine.weights(), copy)
                if measure_accuracy(copy, test[:_MEASURED_PROBLEMS]) >= target:
                    break
        _copy_weights(model.engine.weights(), copy)
        write_weights(assets.model, model.engine.weights())
    return WarmUp(measure_accuracy(copy, test), step, time.perf_counter() - start)


def encode(tokenizer: PreTrainedTokenizerBase, problems: Sequence[tuple[str, str]]) -> Tensor:
    """Return tokens [N, L]: prompt, answer, end token. All problems have the same length."""
    end = tokenizer.eos_token_id
    return torch.tensor([[*tokenizer.encode(prompt + answer), end] for prompt, answer in problems])


@torch.no_grad()
def generate_greedy(model: PreTrainedModel, prompts: Tensor, length: int = RESPONSE_LENGTH) -> Tensor:
    """Return greedy responses [N, length] to prompts [N, P] of equal length."""
    model.eval()
    step, cache, tokens = prompts, None, []
    for _ in range(length):
        output = model(input_ids=step, past_key_values=cache, use_cache=True)
        step, cache = output.logits[:, -1].argmax(-1, keepdim=True), output.past_key_values
        tokens.append(step)
    return torch.cat(tokens, dim=1)


def measure_accuracy(model: PreTrainedModel, rows: Tensor) -> float:
    """Return the share of rows [N, L] whose answer, end token included, is generated greedily."""
    prompts, answers = rows[:, :-RESPONSE_LENGTH], rows[:, -RESPONSE_LENGTH:]
    return float((generate_greedy(model, prompts) == answers).all(dim=1).float().mean())


def _copy_weights(weights: Iterable[tuple[str, Tensor]], model: PreTrainedModel) -> None:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights:
            parameters.pop(name).copy_(tensor)
    if parameters:
        raise EngineError(f"the training engine has no weights for {', '.join(parameters)}")
