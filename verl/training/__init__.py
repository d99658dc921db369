"""Training engines behind the interface `TrainEngine`, implemented with FSDP2, and the policy training built on them.

Workers and the layers above may import this package. It uses algorithms, data and torch.distributed, but neither Ray
nor the configuration.
"""
