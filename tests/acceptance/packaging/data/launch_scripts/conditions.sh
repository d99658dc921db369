# given: RUN_MODE=full
USE_LORA=${USE_LORA:-False}
LORA=""
if [ "$USE_LORA" = "True" ]; then
    LORA="actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=16"
fi
if [[ $RUN_MODE == full && -z ${DEBUG:-} ]]; then batch=1024; elif [[ $RUN_MODE == small ]]; then batch=16; else batch=8; fi
[ -d "$HOME/data" ] && data=$HOME/data || data=/shared/data
python3 -m verl.trainer.main_ppo data.train_batch_size=$batch data.train_files=$data/train.parquet $LORA
