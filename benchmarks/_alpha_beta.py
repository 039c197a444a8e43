"""How long would an all_reduce, and ours around it, take with other ranks and bytes? A model, fitted to runs; pure.

    seconds = call + 2 (ranks - 1) alpha + 2 (ranks - 1) / ranks x bytes x beta

gloo's all_reduce is a ring (gloo/allreduce.cc): the bytes are cut into a chunk per rank, and every chunk goes round
twice, once to be summed and once to be handed out. A rank makes 2 (ranks - 1) hops with a chunk each. A chunk travels
in two or more segments of at most 1 MiB, one under way while the other is summed: what they take beyond the hop is in
beta. One collective carries at most 2^30 bytes of fp32 at the default ``buffer_size``; more are counted as one here.

Ours adds to it:

exchange    of a header per rank, as _scaling.py has it: ranks - 1 hops, and 128 bytes of every other rank
reading     of those headers, so many seconds a row
call        what else a call takes, whatever it carries
local       a pass over the gradients (the division; with checks the norm): so many seconds a byte, on every rank
tensors     so many seconds for each
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from _scaling import Network, ring_hops

Times = Mapping[tuple[int, int], float]  # seconds by (ranks, bytes)


@dataclass(frozen=True)
class Ring:
    """A bare all_reduce in some network."""

    name: str
    call_seconds: float
    alpha_seconds: float
    beta_seconds: float

    def seconds(self, size: int, size_bytes: int) -> float:
        calls, hops, bytes_sent = ring_terms(size, size_bytes)
        return calls * self.call_seconds + hops * self.alpha_seconds + bytes_sent * self.beta_seconds

    def exchange_seconds(self, size: int) -> float:
        """Of the headers; without reading them."""
        return Network(self.name, self.alpha_seconds, self.beta_seconds).exchange_seconds(ring_hops, size)


@dataclass(frozen=True)
class Ours:
    """What the explicit call adds to a bare all_reduce, but for the exchange of headers."""

    call_seconds: float
    byte_seconds: float
    tensor_seconds: float
    row_seconds: float

    def seconds(self, ring: Ring, size: int, size_bytes: int, tensors: int) -> float:
        """The whole call in that network."""
        own = self.call_seconds + size_bytes * self.byte_seconds + tensors * self.tensor_seconds
        return ring.seconds(size, size_bytes) + ring.exchange_seconds(size) + size * self.row_seconds + own


def ring_terms(size: int, size_bytes: int) -> tuple[float, float, float]:
    """How often each cost occurs: the call's, a hop's, a byte's."""
    return 1.0, 2.0 * (size - 1), 2.0 * (size - 1) / size * size_bytes


def fit_ring(name: str, times: Times) -> Ring:
    """The ring that explains the times best, in relative terms.

    With a single number of ranks, a call and its hops cannot be told apart: all of it is then counted as hops, which
    overstates what more ranks would take.
    """
    terms = [ring_terms(*key) for key in times]
    if len({size for size, _ in times}) > 1:
        return Ring(name, *fit_costs(terms, list(times.values())))
    return Ring(name, 0.0, *fit_costs([term[1:] for term in terms], list(times.values())))


def fit_ours(ring: Ring, bare: Times, whole: Times, *, tensors: int, tensor_seconds: float, row_seconds: float) -> Ours:
    """What is left of ``whole`` - ``bare``, taken from the same runs, after what is known of it.

    A remainder below zero, which noise can leave, counts as nothing.
    """
    left = []
    for (size, size_bytes), seconds in whole.items():
        known = ring.exchange_seconds(size) + size * row_seconds + tensors * tensor_seconds
        left.append(seconds - bare[size, size_bytes] - known)
    terms = [(1.0, float(size_bytes)) for _, size_bytes in whole]
    call_seconds, byte_seconds = fit_costs(terms, left, scales=list(whole.values()))
    return Ours(call_seconds, byte_seconds, tensor_seconds, row_seconds)


def fit_costs(
    terms: Sequence[Sequence[float]], seconds: Sequence[float], *, scales: Sequence[float] | None = None
) -> list[float]:
    """Costs, none below 0, that make ``terms`` times costs come nearest to ``seconds``, by least squares.

    A miss counts relative to ``scales`` (default: the seconds themselves), or the longest times alone would decide.
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


def residuals(ring: Ring, times: Times) -> dict[tuple[int, int], float]:
    """By how much the ring is off, relative to the measured time; above 0 where it says too much."""
    return {key: ring.seconds(*key) / seconds - 1 for key, seconds in times.items()}


def typical_and_worst(missed: Mapping[str, float]) -> tuple[float, str]:
    """The median size of the residuals, and whose is the largest."""
    sizes = {key: abs(value) for key, value in missed.items()}
    return statistics.median(sizes.values()), max(sizes, key=sizes.__getitem__)
