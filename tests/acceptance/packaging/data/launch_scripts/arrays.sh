#!/bin/bash
set -xeuo pipefail
DATA=(
    data.train_files="['a b.parquet','c.parquet']"   # two files
    data.train_batch_size=256
)
MODEL=(actor_rollout_ref.model.path="Qwen/Qwen2.5-7B")
MODEL+=("actor_rollout_ref.model.enable_gradient_checkpointing=True")
EXTRA=()
python3 -m verl.trainer.main_ppo "${DATA[@]}" "${MODEL[@]}" ${EXTRA[@]+"${EXTRA[@]}"} "trainer.nnodes=${#DATA[@]}"
