# part of nested.sh
seed=$1; shift
exec python3 -m verl.trainer.main_ppo data.seed=$seed data.train_batch_size=$BATCH "$@"
