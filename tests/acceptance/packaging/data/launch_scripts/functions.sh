#!/bin/bash
common() {
    local lr=$1; shift
    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.optim.lr="$lr" "$@"
}
name() { echo "grpo_$(basename "$1" | tr 'A-Z' 'a-z')"; }
model=Qwen/Qwen3-0.6B
common 1e-6 actor_rollout_ref.model.path=$model trainer.experiment_name=$(name $model)
common 5e-7 "trainer.experiment_name=second run"
