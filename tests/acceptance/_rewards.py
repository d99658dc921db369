"""Rewards that a model without any training can climb."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits in the answer."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


def score_digits(data_source, solution_str, ground_truth, extra_info=None):
    """Whether the sum is correct, and two components: the share of correct digits, and whether there are three."""
    response, answer = solution_str.strip(), str(ground_truth)
    digits = sum(a == b for a, b in zip(response, answer, strict=False)) / len(answer)
    return {
        "score": float(response == answer),
        "digits": digits,
        "format": float(response.isdigit() and len(response) == len(answer)),
    }
