set -e
uv pip install vllm
uv run --frozen python -m verl.trainer.main_ppo data.seed=1
uv run python3 verl/trainer/main_ppo.py data.seed=2
conda run -n verl --no-capture-output python -m verl.trainer.main_ppo data.seed=3
accelerate launch --num_processes 4 -m verl.trainer.sft_trainer data.max_length=512
