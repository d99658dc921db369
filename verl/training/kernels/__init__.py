"""Functions of tensors that engines share: attention on packed sequences, log-probs, differentiable collectives."""
