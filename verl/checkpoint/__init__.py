"""Atomic checkpoints: sharded state as safetensors files, and the directories that hold it.

State is nested dictionaries of tensors and plain values, never a model. Imported by training and everything above.
"""
