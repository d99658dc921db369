"""The patterns that users know: the Python snippets of the usage guide that name verl, as they stand there."""

PPO = """\
from verl import PPOTrainer
from verl.trainer import TrainingConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

# Load model
model = AutoModelForCausalLM.from_pretrained(
    "meta-llama/Llama-2-7b-hf",
    torch_dtype=torch.bfloat16,
    device_map="auto"
)
tokenizer = AutoTokenizer.from_pretrained("meta-llama/Llama-2-7b-hf")

# Configure training
config = TrainingConfig(
    total_epochs=3,
    batch_size=8,
    learning_rate=1e-6,
    ppo_epochs=4,
    clip_range=0.2,
    kl_coef=0.1,
)

# Create trainer
trainer = PPOTrainer(model, tokenizer, config)

# Train
trainer.train(train_dataloader)
"""

GRPO = """\
from verl import GRPOTrainer

# Similar setup to PPO
trainer = GRPOTrainer(model, tokenizer, config)
trainer.train(train_dataloader)
"""

WORKERS = """\
from verl.workers import RolloutWorker, TrainerWorker

# Create workers
rollout_worker = RolloutWorker(
    model=model,
    inference_engine="vllm",  # or "sglang", "hf"
    device="cuda:0"
)

trainer_worker = TrainerWorker(
    model=model,
    optimizer=optimizer,
    device="cuda:1"
)

# Execute RL loop
for epoch in range(num_epochs):
    # Rollout phase (generation)
    rollout_data = rollout_worker.generate(prompts)

    # Training phase (optimization)
    metrics = trainer_worker.train_step(rollout_data)
"""
