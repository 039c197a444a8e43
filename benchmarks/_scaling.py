"""Model of the time of the header exchange by number of ranks; not measured. Pure.

    seconds = hops x alpha + (ranks - 1) x 128 bytes x beta + reading

all_gather           a ring, as in gloo (gloo/allgather.cc): every row makes ranks - 1 hops, in two halves of 64
                     bytes, so each rank sends 2 (ranks - 1) messages
recursive doubling   ceil(log2 ranks) hops, each with all rows so far; not built. gloo's barrier makes as many empty
                     hops (gloo/barrier.cc, a dissemination barrier), so a barrier measures their time
reading              decoding and comparing the rows, on every rank: seconds per row, measured on one rank
"""

import bisect
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from legacy_ddp._agreement.header import HEADER_BYTES

ROW_BYTES = HEADER_BYTES
MOST_RANKS = 2**20  # where the search for a limit ends

Hops = Callable[[int], int]


@dataclass(frozen=True)
class Network:
    """``alpha_seconds`` per hop of any size, and ``beta_seconds`` per byte."""

    name: str
    alpha_seconds: float
    beta_seconds: float

    def exchange_seconds(self, hops: Hops, size: int) -> float:
        """Time until every rank has every row, without reading the rows."""
        return hops(size) * self.alpha_seconds + (size - 1) * ROW_BYTES * self.beta_seconds


def ring_hops(size: int) -> int:
    """Sequential hops in gloo's all_gather."""
    return size - 1


def doubling_hops(size: int) -> int:
    """Sequential hops in recursive doubling, and in gloo's barrier."""
    return (size - 1).bit_length()


def fit_alpha(hops: Hops, seconds: Mapping[int, float]) -> float:
    """Seconds per hop by least squares through 0, from times by number of ranks."""
    return sum(hops(size) * time for size, time in seconds.items()) / sum(hops(size) ** 2 for size in seconds)


def seconds_per_row(reading: Mapping[int, float], *, least_size: int = 64) -> float:
    """Median time of reading one row, from times by number of ranks; small numbers of ranks are left out."""
    return statistics.median(seconds / size for size, seconds in reading.items() if size >= least_size)


def limits(network: Network, row_seconds: float, limit_seconds: float, sizes: Iterable[int]) -> dict[str, Any]:
    """Times of both algorithms in the network, and their largest number of ranks within ``limit_seconds``."""
    result: dict[str, Any] = {"network": network.name, "alpha_us": 1e6 * network.alpha_seconds}
    sizes = tuple(sizes)
    for way, hops in {"all_gather": ring_hops, "recursive_doubling": doubling_hops}.items():
        exchange = partial(network.exchange_seconds, hops)
        result[way] = {
            "exchange_ms": {str(size): 1e3 * exchange(size) for size in sizes},
            "most_ranks": most_ranks(exchange, limit_seconds),
            "most_ranks_with_reading": most_ranks(lambda size, e=exchange: e(size) + size * row_seconds, limit_seconds),
        }
    return result


def most_ranks(seconds: Callable[[int], float], limit_seconds: float) -> int:
    """The largest number of ranks, up to ``MOST_RANKS``, with an exchange within the limit. ``seconds`` must ascend."""
    return bisect.bisect_right(range(1, MOST_RANKS + 1), limit_seconds, key=seconds)
