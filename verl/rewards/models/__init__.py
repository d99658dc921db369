"""Reward models: the interface, its inputs, and the transformers implementation."""
