"""Fit of costs to measured times, and the error of a model. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations

import torch


def fit_costs(
    terms: Sequence[Sequence[float]], seconds: Sequence[float], *, scales: Sequence[float] | None = None
) -> list[float]:
    """Non-negative costs with the least squared error of ``terms`` times costs against ``seconds``.

    Errors are relative to ``scales`` (default: ``seconds``); otherwise the longest times alone would decide.
    """
    scale = torch.tensor(scales or seconds, dtype=torch.float64)
    matrix = torch.tensor(terms, dtype=torch.float64) / scale[:, None]
    wanted = torch.tensor(seconds, dtype=torch.float64) / scale
    best, least = [0.0] * matrix.shape[1], float(wanted.norm())
    # The best without any below 0 is the best of some subset, and there are few subsets of few costs.
    for count in range(1, matrix.shape[1] + 1):
        for columns in map(list, combinations(range(matrix.shape[1]), count)):
            costs = _least_squares(matrix[:, columns], wanted)
            missed = float((matrix[:, columns] @ costs - wanted).norm())
            if bool((costs >= 0).all()) and missed < least:
                least, best = missed, [0.0] * matrix.shape[1]
                for column, cost in zip(columns, costs.tolist(), strict=True):
                    best[column] = cost
    return best


def _least_squares(matrix: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    # A call counts once and its bytes in millions; scaled to one size, no column costs another its digits.
    sizes = matrix.norm(dim=0)
    return torch.linalg.lstsq(matrix / sizes, wanted[:, None]).solution[:, 0] / sizes


def typical_and_worst(missed: Mapping[str, float]) -> tuple[float, str]:
    """The median absolute residual, and the key of the largest."""
    sizes = {key: abs(value) for key, value in missed.items()}
    return statistics.median(sizes.values()), max(sizes, key=sizes.__getitem__)
