gsm8k_train_path=$HOME/data/gsm8k/train.parquet
math_train_path=${HOME}/data/math/train.parquet
train_files="['$gsm8k_train_path', '$math_train_path']"
python3 -m verl.trainer.main_ppo \
    data.train_files="$train_files" \
    data.val_files=~/data/gsm8k/test.parquet \
    trainer.default_local_dir="${HOME}/checkpoints/${USER}/run 1"
