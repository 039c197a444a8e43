"""Model of the time of the header exchange by number of ranks. Pure.

    seconds = hops x alpha + messages x message + bytes x beta + turns x turn

all_gather   of gloo, a ring (gloo/allgather.cc): every row makes ranks - 1 hops, in two halves, each a message
tree         of legacy_ddp/_ranks/star.py, where hosts have equal numbers of ranks. Rows go up to the root, a
             message of each rank or part; the rows of all ranks come down. A hub handles the messages of the ranks
             below it one after the other

Hops, messages and bytes are those of the longest way, one after the other. Turns: where ranks share cores, a rank waits
for a turn of every other rank on its core before each of its messages. Bytes on a host count like those between hosts.
"""

import bisect
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from _fit import fit_costs

from legacy_ddp._ranks.first_meeting import ARITY
from legacy_ddp._ranks.header import HEADER_BYTES, SegmentIds, encode_segments

ROW_BYTES = HEADER_BYTES
TREE_ROW_BYTES = HEADER_BYTES + len(encode_segments(SegmentIds()))
MOST_RANKS = 2**20  # where the search for a limit ends


@dataclass(frozen=True)
class Exchange:
    """Counts of an exchange of ``size`` ranks on its longest way. ``messages_of_each``: of a rank, in the mean."""

    size: int
    hops: int
    messages: int
    size_bytes: int
    messages_of_each: float


@dataclass(frozen=True)
class Network:
    """Seconds per hop, message, byte and turn. ``cores``: shared by all ranks."""

    alpha_seconds: float
    message_seconds: float
    beta_seconds: float
    turn_seconds: float = 0.0
    cores: float = math.inf

    def seconds(self, exchange: Exchange) -> float:
        """Time until every rank has every row, without reading the rows."""
        return (
            exchange.hops * self.alpha_seconds
            + exchange.messages * self.message_seconds
            + exchange.size_bytes * self.beta_seconds
            + turns(exchange, self.cores) * self.turn_seconds
        )


def turns(exchange: Exchange, cores: float) -> float:
    """The turns of other ranks that a rank waits for."""
    return max(0.0, exchange.size / cores - 1) * exchange.messages_of_each


def ring(size: int) -> Exchange:
    """The exchange in gloo's all_gather."""
    others = size - 1
    return Exchange(size, others, 2 * others, others * ROW_BYTES, 2 * others)


def tree(size: int, per_host: int) -> Exchange:
    """The exchange in a tree of stars, with ``per_host`` ranks on each host."""
    on_host = min(size, per_host) - 1
    below = hubs_below(-(-size // per_host))
    # Up, the ranks of a host have long sent their rows when the hubs below have theirs. Down, a hub may come last.
    up, down = on_host + sum(below), on_host * (len(below) + 1) + sum(below)
    hops = 2 * ((on_host > 0) + len(below))
    return Exchange(size, hops, up + down, (size - 1 + down * size) * TREE_ROW_BYTES, 2 * (size - 1) / size)


def hubs_below(hosts: int) -> list[int]:
    """The number of hubs below each hub on the longest way, from the root on."""
    counts, hub = [], 0
    while (count := min(ARITY, hosts - 1 - ARITY * hub)) > 0:
        counts.append(count)
        hub = ARITY * hub + 1
    return counts


def fit_network(
    exchange: Callable[[int], Exchange],
    seconds: Mapping[int, float],
    *,
    message_seconds: float,
    beta_seconds: float,
    cores: int,
) -> Network:
    """The network with the least relative error for times by number of ranks: hops and turns are fitted."""
    known = Network(0.0, message_seconds, beta_seconds)
    counts = {size: exchange(size) for size in seconds}
    terms = [(count.hops, turns(count, cores)) for count in counts.values()]
    left = [time - known.seconds(counts[size]) for size, time in seconds.items()]
    alpha, turn = fit_costs(terms, left, scales=list(seconds.values()))
    return Network(alpha, message_seconds, beta_seconds, turn, cores)


def seconds_per_row(reading: Mapping[int, float], *, least_size: int = 64) -> float:
    """Median time of reading one row, from times by number of ranks; small numbers of ranks are left out."""
    return statistics.median(seconds / size for size, seconds in reading.items() if size >= least_size)


def seconds_per_message(hub: Mapping[int, float]) -> float:
    """Time of one message on a hub, from times of its exchange by number of ranks below it: two messages for each."""
    _, of_each = fit_costs([(1.0, 2.0 * ranks) for ranks in hub], list(hub.values()))
    return of_each


def most_ranks(seconds: Callable[[int], float], limit_seconds: float) -> int:
    """The largest number of ranks, up to ``MOST_RANKS``, with an exchange within the limit. ``seconds`` must ascend."""
    return bisect.bisect_right(range(1, MOST_RANKS + 1), limit_seconds, key=seconds)
