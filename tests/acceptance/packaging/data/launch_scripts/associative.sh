#!/bin/bash
# given: MODEL=8b
declare -A PATHS=([0.6b]=Qwen/Qwen3-0.6B [8b]=Qwen/Qwen3-8B)
declare -A TP; TP[0.6b]=1; TP[8b]=2
declare -i batch=32*4
key=${MODEL}
ref=batch
python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=${PATHS[$key]} data.train_batch_size=${!ref} \
    actor_rollout_ref.rollout.tensor_model_parallel_size=${TP[$key]}
