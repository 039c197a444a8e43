"""Model of the time of an all_reduce, bare and explicit, for any number of ranks and bytes, fitted to runs. Pure.

    seconds = call + 2 (ranks - 1) alpha + 2 (ranks - 1) / ranks x bytes x beta

gloo's all_reduce is a ring (gloo/allreduce.cc): the bytes are cut into a chunk per rank, and every chunk goes round
twice: once for the sum, once to distribute the result. A rank makes 2 (ranks - 1) hops with a chunk each. A chunk
travels in two or more segments of at most 1 MiB, sent and summed in parallel: their time beyond the hop is in beta. One
collective carries at most 2^30 bytes of fp32 at the default ``buffer_size``; more are counted as one here.

The explicit call adds:

exchange    of a header per rank over the tree, as in _scaling.py
reading     of these headers, seconds per row
call        constant time of a call
local       a pass over the gradients (the division; with checks the norm): seconds per byte, on every rank
tensors     seconds per tensor
"""

from collections.abc import Mapping
from dataclasses import dataclass

from _fit import fit_costs
from _scaling import Network, tree

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


@dataclass(frozen=True)
class Headers:
    """Costs of the headers of a call: ``message_seconds`` of a hub, and reading. ``per_host``: ranks on each host."""

    message_seconds: float
    row_seconds: float
    per_host: int

    def seconds(self, ring: Ring, size: int) -> float:
        """Time to exchange and read the headers in the network of ``ring``."""
        network = Network(ring.alpha_seconds, self.message_seconds, ring.beta_seconds)
        return network.seconds(tree(size, self.per_host)) + size * self.row_seconds


@dataclass(frozen=True)
class Ours:
    """Additional costs of the explicit call over a bare all_reduce and the headers."""

    call_seconds: float
    byte_seconds: float
    tensor_seconds: float

    def seconds(self, ring: Ring, headers: Headers, size: int, size_bytes: int, tensors: int) -> float:
        """Time of the whole call in the network of ``ring``."""
        own = self.call_seconds + size_bytes * self.byte_seconds + tensors * self.tensor_seconds
        return ring.seconds(size, size_bytes) + headers.seconds(ring, size) + own


def ring_terms(size: int, size_bytes: int) -> tuple[float, float, float]:
    """Multiplicity of each cost: call, hop, byte."""
    return 1.0, 2.0 * (size - 1), 2.0 * (size - 1) / size * size_bytes


def fit_ring(name: str, times: Times) -> Ring:
    """The ring with the least relative error for ``times``.

    With a single number of ranks, the cost of a call cannot be separated from the cost of hops: all time is then
    counted as hops, which overstates the time for more ranks.
    """
    terms = [ring_terms(*key) for key in times]
    if len({size for size, _ in times}) > 1:
        return Ring(name, *fit_costs(terms, list(times.values())))
    return Ring(name, 0.0, *fit_costs([term[1:] for term in terms], list(times.values())))


def fit_ours(ring: Ring, headers: Headers, bare: Times, whole: Times, *, tensors: int, tensor_seconds: float) -> Ours:
    """Costs fitted to ``whole`` - ``bare``, times of the same runs, minus the known costs.

    A remainder below zero, caused by noise, counts as zero.
    """
    left = []
    for (size, size_bytes), seconds in whole.items():
        known = headers.seconds(ring, size) + tensors * tensor_seconds
        left.append(seconds - bare[size, size_bytes] - known)
    terms = [(1.0, float(size_bytes)) for _, size_bytes in whole]
    call_seconds, byte_seconds = fit_costs(terms, left, scales=list(whole.values()))
    return Ours(call_seconds, byte_seconds, tensor_seconds)


def residuals(ring: Ring, times: Times) -> dict[tuple[int, int], float]:
    """Error of the model relative to the measured time; above 0 for an overestimate."""
    return {key: ring.seconds(*key) / seconds - 1 for key, seconds in times.items()}
