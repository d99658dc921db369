#!/bin/bash
nohup python3 -m verl.trainer.main_ppo data.seed=1 > run.log 2>&1 &
wait
env -u FOO BAR=1 python3 -m verl.trainer.main_ppo data.seed=2
timeout 48h python3 -m verl.trainer.main_ppo data.seed=3
(cd /workspace/verl && time python3 -m verl.trainer.main_ppo data.seed=4 trainer.default_local_dir=$PWD/out)
PY=$(which python3); $PY -m verl.trainer.main_ppo data.seed=5
cmd="python3 -m verl.trainer.main_ppo data.seed=6 'trainer.experiment_name=x y'"; eval "$cmd"
exec stdbuf -oL python3 -m verl.trainer.main_ppo data.seed=7
