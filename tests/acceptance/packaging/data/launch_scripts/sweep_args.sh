#!/bin/bash
# arguments: --lr 3e-6 --name "my run" -- data.seed=5 +a.b=1
lr=1e-6
while [[ $# -gt 0 ]]; do
    case $1 in
        --lr) lr=$2; shift 2 ;;
        --name=*) name=${1#*=}; shift ;;
        --name) name=$2; shift 2 ;;
        --) shift; break ;;
        *) shift ;;
    esac
done
python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.optim.lr=$lr "trainer.experiment_name=${name}" "$@"
