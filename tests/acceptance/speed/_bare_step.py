"""The bare parts of a step, each in a process of its own: python _bare_step.py generation|update MODEL MAX_LENGTH.

A line of JSON on standard input is one task, a line on standard output the seconds that it took.

`generation`: vLLM's `LLM.generate` on [[prompt ids, tokens to generate], ...], with log-probs.
`update`: a plain PyTorch policy gradient step with FSDP2 on one rank, for [[prompt length, length], ...]: sequences
sorted by length and padded in micro-batches.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

MICRO_BATCH_TOKENS = 4096


def main() -> None:
    kind, model, longest = sys.argv[1:]
    run = {"generation": make_generation, "update": make_update}[kind](model, int(longest))
    print("ready", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        begun = time.perf_counter()
        run(task)
        print(json.dumps(time.perf_counter() - begun), flush=True)


def make_generation(path: str, longest: int) -> Callable[[list[Any]], None]:
    from vllm import LLM, SamplingParams

    engine = LLM(path, dtype="float32", max_model_len=longest, max_num_seqs=256, enforce_eager=True)

    def run(requests: list[Any]) -> None:
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        sampling = [
            SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, logprobs=0, detokenize=False)
            for _, count in requests
        ]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        assert [len(each.outputs[0].token_ids) for each in outputs] == [count for _, count in requests]

    return run


def make_update(path: str, longest: int) -> Callable[[list[Any]], None]:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    vocabulary = model.config.vocab_size
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)

    def run(lengths: list[list[int]]) -> None:
        trained = sum(total - prompt for prompt, total in lengths)
        for batch in micro_batches(lengths):
            prompts, totals = torch.tensor(batch).T
            tokens = torch.randint(vocabulary, (len(batch), int(totals.max())))
            positions = torch.arange(tokens.shape[1] - 1) + 1
            mask = (positions >= prompts[:, None]) & (positions < totals[:, None])
            logits = model(tokens, use_cache=False).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
            ratio = (logprobs - logprobs.detach()).exp()
            loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * mask
            (loss.sum() / trained).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def micro_batches(lengths: list[list[int]]) -> Iterator[list[list[int]]]:
    """Yield sequences sorted by length, as many at once as fit padded."""
    batch: list[list[int]] = []
    for sequence in sorted(lengths, key=lambda each: each[1]):
        if batch and (len(batch) + 1) * sequence[1] > MICRO_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(sequence)
    yield batch


if __name__ == "__main__":
    main()
