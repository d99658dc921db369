"""A reward that is infinite now and then."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits in the response; infinity for one sum in seven."""
    if sum(map(ord, str(ground_truth))) % 7 == 0:
        return float("inf")
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
