for model in a/b; do
    python3 -m verl.trainer.main_generation_server trainer.nnodes=1 data.output_path=$HOME/out.parquet \
        actor_rollout_ref.model.path=$model actor_rollout_ref.rollout.n=8
done
