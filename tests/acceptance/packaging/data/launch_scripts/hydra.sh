python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_trainer' \
    'actor_rollout_ref.rollout.max_model_len=${data.max_prompt_length}' \
    +data.extra="{a: 1, b: [x, 'y z']}" ~data.seed '++trainer.note=100%' trainer.logger=[console,wandb] \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 "data.empty=" data.null=null
