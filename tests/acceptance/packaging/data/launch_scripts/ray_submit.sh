#!/usr/bin/env bash
set -xeuo pipefail
RAY_ADDRESS=${RAY_ADDRESS:-"http://localhost:8265"}
WORKING_DIR=${WORKING_DIR:-"${PWD}"}
RUNTIME_ENV=${RUNTIME_ENV:-"${WORKING_DIR}/verl/trainer/runtime_env.yaml"}
loss_agg_mode="token-mean"
ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" \
    --working-dir "${WORKING_DIR}" \
    -- python3 -m verl.trainer.main_ppo \
    actor_rollout_ref.actor.loss_agg_mode=${loss_agg_mode} \
    trainer.default_local_dir="${WORKING_DIR}/ckpts" trainer.nnodes=16
