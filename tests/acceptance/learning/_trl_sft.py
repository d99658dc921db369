"""TRL's SFTTrainer on given examples, in an environment of its own: python _trl_sft.py MODEL EXAMPLES BATCH STEPS.

Its own defaults but for what is made equal to ours: float32 on one CPU thread, no gradient checkpointing, this batch
size, this learning rate, no evaluation and no saving. The last line is JSON: seconds and tokens of all steps but two.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

WARM = 2


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.began = self.cpu = 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == WARM:
            self.began, self.cpu = time.perf_counter(), time.process_time()


def main() -> None:
    model_path, examples_path, batch, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    with open(examples_path) as file:
        examples = json.load(file)[: batch * steps]
    rows = [{"input_ids": tokens, "completion_mask": mask} for tokens, mask in examples]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
            args=SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=batch,
                max_steps=steps,
                learning_rate=1e-4,
                max_length=None,
                bf16=False,
                use_cpu=True,
                gradient_checkpointing=False,
                completion_only_loss=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=PreTrainedTokenizerFast.from_pretrained(model_path),
            callbacks=[clock],
        )
        trainer.train()
    seconds, cpu = time.perf_counter() - clock.began, time.process_time() - clock.cpu
    tokens = sum(len(row["input_ids"]) for row in rows) * (steps - WARM) / steps  # it draws them in an order of its own
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "tokens": tokens}))


if __name__ == "__main__":
    main()
