#!/bin/bash
set -euxo pipefail
pip install -e . --no-deps
wandb login "${WANDB_KEY:-none}"
huggingface-cli download Qwen/Qwen3-0.6B --local-dir /data/models/qwen
if [ ! -f "$HOME/data/gsm8k/train.parquet" ]; then
    python3 examples/data_preprocess/gsm8k.py --local_save_dir "$HOME/data/gsm8k"
fi
rm -rf /data/old && mkdir -p /data/logs
git clone https://example.com/x.git x
python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=/data/models/qwen 2>&1 | tee /data/logs/run.log
