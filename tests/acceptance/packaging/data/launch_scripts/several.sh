for seed in 1 2; do
    for lr in 1e-6 5e-6; do
        python3 -m verl.trainer.main_ppo data.seed=$seed actor_rollout_ref.actor.optim.lr=$lr \
            trainer.experiment_name="s${seed}-lr${lr}" > "log_${seed}_$lr.txt" 2>&1
    done
done
