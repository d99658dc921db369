"""Policy training on one rank: an algorithm applied to the actor, its reference, critic and PRIME reward model."""

from verl.training.policy.prime import PrimeRewardModel
from verl.training.policy.trainer import PolicyTrainer, load_functions

__all__ = ["PolicyTrainer", "PrimeRewardModel", "load_functions"]
