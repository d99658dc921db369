#!/bin/bash
# arguments: trainer.nnodes=3
export BATCH=48
bash "$(dirname "$0")/nested_inner.sh" 7 "$@"
sh -c 'python3 -m verl.trainer.main_ppo data.seed="$1"' name 9
