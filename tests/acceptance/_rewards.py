"""Rewards that a model without any training can climb."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits in the answer."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
