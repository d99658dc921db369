#!/bin/bash
mapfile -t lines < <(printf '%s\n' data.seed=1 "trainer.experiment_name=a b" "" | grep .)
read -r nodes gpus <<< "2 8"
IFS=, read -ra sizes <<< "1,2,4"
python3 -m verl.trainer.main_ppo "${lines[@]}" trainer.nnodes=$nodes trainer.n_gpus_per_node=$gpus \
    actor_rollout_ref.rollout.tensor_model_parallel_size=${sizes[1]}
