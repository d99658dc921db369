"""A reward that takes its time, so that its worker is busy when it is killed."""

import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the share of digits in the response."""
    time.sleep(0.02)
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
