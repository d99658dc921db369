"""TRL's GRPOTrainer, in an environment of its own: python _trl_grpo.py MODEL PROMPTS RESPONSES LONGEST STEPS.

Its own defaults but for what is made equal to ours: float32 on the CPU, the batch, the length of responses, no
reference model, no gradient checkpointing, no evaluation and no saving. It takes a step for each line on its standard
input, and prints a line of JSON after it: the seconds of the step and the tokens that it generated.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

THREADS = 2  # as many cores as we take


class StepOnRequest(TrainerCallback):
    """Waits before each step for a line, and prints afterwards how long it took."""

    def __init__(self) -> None:
        self.tokens = 0
        self._begun = 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        sys.stdin.readline()
        self._begun = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        print(json.dumps([time.perf_counter() - self._begun, self.tokens]), flush=True)


def main() -> None:
    path = sys.argv[1]
    prompts, responses, longest, steps = map(int, sys.argv[2:])
    torch.set_num_threads(THREADS)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    draw = random.Random(0)
    rows = [{"prompt": f"{draw.randrange(100)}+{draw.randrange(100)}="} for _ in range(prompts * steps)]
    callback = StepOnRequest()

    def reward(completions, completion_ids, **columns) -> list[float]:
        callback.tokens = sum(map(len, completion_ids))
        return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=prompts * responses,
                num_generations=responses,
                max_completion_length=longest,
                max_steps=steps,
                learning_rate=1e-9,
                beta=0.0,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_steps=10_000,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[callback],
        )
        print("ready", flush=True)
        trainer.train()


if __name__ == "__main__":
    main()
