"""Training engines behind one small interface, `TrainEngine`: FSDP2 for any Hugging Face causal model, and a fake.

Workers and what stands above them may import this package; it knows algorithms, data and torch.distributed, and
neither Ray nor settings.
"""
