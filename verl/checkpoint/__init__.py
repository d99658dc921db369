"""Saving and resuming: sharded state through torch.distributed.checkpoint, and the directories that it lies in.

What is saved comes as dictionaries of tensors and plain values, never as a model. Training engines, the trainer and
what stands above them may import this package; it knows torch.distributed and nothing of RL.
"""
