#!/bin/bash
export VLLM_USE_V1=1 CUDA_DEVICE_MAX_CONNECTIONS=1
export HYDRA_FULL_ERROR=1
export RUN_NAME="qwen-$(printf '%03d' 7)"
PYTHONUNBUFFERED=1 HF_HOME=/data/hf python3 -u -m verl.trainer.main_ppo trainer.experiment_name=$RUN_NAME \
    +ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG=INFO data.seed=1 2>&1 | tee train.log
