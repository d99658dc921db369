"""vLLM as a rollout engine and as a reward model. The only package that imports vllm."""
