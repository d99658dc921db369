#!/bin/bash
# given: RANK=0 WORLD_SIZE=2
ulimit -n 65535
ray stop --force
if [ $RANK -eq 0 ]; then
    ray start --head --port=6379
    until ray status; do sleep 10; done
    python3 -m verl.trainer.main_ppo trainer.nnodes=$WORLD_SIZE trainer.n_gpus_per_node=8
else
    ray start --address="$MASTER_ADDR:6379" --block
fi
