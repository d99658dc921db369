"""verl makes language models better by reinforcement learning: the same program on a laptop and on a cluster."""

__version__ = "0.1.0"

__all__ = ["__version__"]
