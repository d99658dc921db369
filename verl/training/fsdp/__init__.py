"""The training engine on FSDP2: Hugging Face models on packed sequences, sharded over the ranks."""
