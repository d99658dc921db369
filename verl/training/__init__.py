"""Training engines behind the interface `TrainEngine`, implemented with FSDP2, and the policy training built on them.

Workers and the layers above may import this package. It does not import Ray or vLLM; its settings are records of its
own (`settings.py`), which the trainer fills in from the configuration.
"""
