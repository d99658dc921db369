"""Sums, and questions to which every answer is worth the same: a model learns nothing from those."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right sum; always 0 or always 1 where the data says so."""
    fixed = (extra_info or {}).get("fixed", -1)
    return float(solution_str.strip() == ground_truth) if fixed < 0 else float(fixed)
