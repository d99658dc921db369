set -x
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    trainer.logger='["console","wandb"]' \
    trainer.total_epochs=15 $@
