#!/bin/bash
# arguments: 7b
size=${1:-1.5b}
shift || true
case "$size" in
    0.5b | 1.5b) batch=128; tp=1 ;;
    7b) batch=1024; tp=2 ;;
    *) echo "unknown size $size" >&2; exit 1 ;;
esac
python3 -m verl.trainer.main_ppo data.train_batch_size=$batch \
    actor_rollout_ref.rollout.tensor_model_parallel_size=$tp "$@"
