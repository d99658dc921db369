#!/usr/bin/env bash
# given: NNODES=4
set -euo pipefail
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
NNODES=${NNODES:-1}
: "${ROLLOUT_N:=16}"
SUFFIX=${TAG:+-$TAG}
python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path="$MODEL_PATH" trainer.nnodes=${NNODES} \
    actor_rollout_ref.rollout.n=$ROLLOUT_N trainer.experiment_name="qwen3${SUFFIX}" trainer.project_name=${PROJECT-p}
