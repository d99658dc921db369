"""Reward models: the interface, batching, tokenization, and the implementation on transformers."""
