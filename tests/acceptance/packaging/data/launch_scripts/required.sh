#!/usr/bin/env bash
# open: MODEL_PATH TRAIN_FILE
set -euo pipefail
: "${MODEL_PATH:?set MODEL_PATH to a checkpoint}"
python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path="${MODEL_PATH}" data.train_files=$TRAIN_FILE \
    trainer.experiment_name="$(basename "$PWD")-x"
