"""What the engines do alone, in processes of their own: python _bare.py generation|update MODEL.

`generation`: vLLM generates the responses of half a step, with one thread, as one of the run's two engines does.
`update`: a plain PyTorch update on given numbers of sequences and tokens, with two threads, as both ranks have.
The last line is JSON: seconds and tokens of the best of three.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

PROMPTS, RESPONSES, MAX_TOKENS = 8, 8, 24  # of one of two engines
SEQUENCES, LENGTH, AT_ONCE = 128, 63, 16


def main() -> None:
    kind, model = sys.argv[1:]
    seconds, tokens = {"generation": generate, "update": update}[kind](model)
    print(json.dumps({"seconds": seconds, "tokens": tokens}))


def generate(path: str) -> tuple[float, int]:
    from vllm import LLM, SamplingParams

    engine = LLM(path, dtype="float32", max_model_len=80, max_num_seqs=PROMPTS * RESPONSES, enable_prefix_caching=True)
    sampling = SamplingParams(n=RESPONSES, temperature=0.7, max_tokens=MAX_TOKENS)

    def once(turn: int) -> int:
        asked = [f"What is {20 + turn} + {30 + i}? Answer with the number only." for i in range(PROMPTS)]
        chats = [[{"role": "user", "content": text}] for text in asked]
        outputs = engine.chat(chats, sampling, use_tqdm=False)
        return sum(len(response.token_ids) for output in outputs for response in output.outputs)

    return best_of_three(once)


def update(path: str) -> tuple[float, int]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = torch.randint(1000, 40000, (SEQUENCES, LENGTH))

    def once(turn: int) -> int:
        for batch in tokens.split(AT_ONCE):
            logits = model(batch).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            (loss * len(batch) / SEQUENCES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return tokens.numel()

    return best_of_three(once)


def best_of_three(once: Callable[[int], int]) -> tuple[float, int]:
    """The quickest per token, after one that warms up."""
    once(0)
    results = []
    for turn in range(1, 4):
        begun = time.perf_counter()
        tokens = once(turn)
        results.append((time.perf_counter() - begun, tokens))
    return min(results, key=lambda result: result[0] / result[1])


if __name__ == "__main__":
    main()
