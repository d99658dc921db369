#!/bin/bash
# arguments: -n 4 -v extra=1
verbose=False
while getopts "n:v" option; do
    case $option in n) nodes=$OPTARG ;; v) verbose=True ;; esac
done
shift $((OPTIND - 1))
python3 -m verl.trainer.main_ppo trainer.nnodes=$nodes trainer.val_before_train=$verbose "$@"
