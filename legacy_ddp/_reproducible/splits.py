"""Splits of a step's micro-batches over ranks, and which splits give sums in the same order. Pure.

Micro-batches are the leaves of a binary tree. Rank r of W ranks with K micro-batches each holds leaves r K to
r K + K - 1. The sum of a rank is a node of the tree if K is a power of two, or if there is no other rank. The sum of a
host is a node of the tree over the ranks if the host has a power of two of consecutive ranks, as many as each host
before it.
"""

from collections.abc import Sequence
from itertools import pairwise

from legacy_ddp._argument_errors import argument_errors


def is_aligned(ranks: int, each: int) -> bool:
    """Whether ``ranks`` ranks with ``each`` micro-batches each add in the order of the tree."""
    return each >= 1 and (ranks == 1 or each.bit_count() == 1)


@argument_errors
def aligned_splits(total: int) -> list[tuple[int, int]]:
    """All (ranks, micro-batches each) of ``total`` micro-batches with the same order of sums; fewest ranks first.

    Raises:
        TypeError, ValueError: ``total`` is no int of at least 1.

    Example:
        >>> aligned_splits(4)
        [(1, 4), (2, 2), (4, 1)]
    """
    if not isinstance(total, int) or isinstance(total, bool):
        raise TypeError(f"total is of the wrong type: got {total!r}, expected a number of micro-batches, an int")
    if total < 1:
        raise ValueError(f"total is out of range: got {total}, expected at least 1 micro-batch")
    powers = (1 << power for power in range(total.bit_length()))
    return sorted({(1, total), *((total // each, each) for each in powers if total % each == 0)})


def format_splits(total: int) -> str:
    """The aligned splits of ``total``, for an error message."""
    splits = ", ".join(f"{ranks} x {each}" for ranks, each in aligned_splits(total))
    return f"splits of {total} that add in one order (ranks x each): {splits}"


def why_no_nodes(hosts: Sequence[Sequence[int]]) -> str:
    """Why the sum of a host is no node of the tree; empty if the sums of all hosts are nodes.

    ``hosts``: the ranks of every host, ascending; equally many on each.
    """
    each = len(hosts[0])
    if each.bit_count() != 1:
        return f"{each} ranks on each host, which is no power of two"
    for ranks in hosts:
        for rank, following in pairwise(ranks):
            if following != rank + 1:
                return f"ranks {rank} and {following} of a host are not consecutive"
    return ""
