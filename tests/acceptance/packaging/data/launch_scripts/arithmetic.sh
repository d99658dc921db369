max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
use_dynamic_bsz=True
actor_ppo_max_token_len=$(( (max_prompt_length + max_response_length) * 2 ))
infer=$((actor_ppo_max_token_len > 16384 ? actor_ppo_max_token_len : 16384))
((n = 4, n += 12))
let gpus=2*4
ratio=$(awk 'BEGIN { printf "%.2f", 1 / 8 }')
python3 -m verl.trainer.main_ppo data.max_prompt_length=${max_prompt_length} data.max_response_length=$max_response_length \
    actor_rollout_ref.actor.use_dynamic_bsz=${use_dynamic_bsz} actor_rollout_ref.rollout.n=$n \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} trainer.n_gpus_per_node=$gpus \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$infer actor_rollout_ref.actor.clip_ratio=$ratio
