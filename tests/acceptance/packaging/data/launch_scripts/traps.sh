#!/bin/bash
set -Eeuo pipefail
trap 'echo failed; exit 1' ERR
trap 'rm -f /tmp/lock' EXIT
exec > >(tee -a run.log) 2>&1
if ! command -v nvidia-smi >/dev/null; then gpus=4; else gpus=8; fi
python3 -m verl.trainer.main_ppo data.seed=$( ( exit 3 ) || echo 3 ) || { echo "training failed"; exit 1; }
