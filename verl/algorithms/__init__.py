"""Advantages, losses, KL and aggregation as pure functions of tensors, each a few lines that look like its formula.

They import torch and nothing else; training and everything above may import them. Flat arrays throughout: per-token
values are `[T]`, sequences lie end to end between `offsets [B+1]`, and `mask [T]` marks what the model generated.
"""
