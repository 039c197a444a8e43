"""Which splits of a step's micro-batches over ranks add them up in the same order? Pure.

Micro-batches are the leaves of a binary tree, and rank r of W with K each holds leaves r K to r K + K - 1. Its own sum
is a node of the tree if K is a power of two, or if there is no other rank.
"""

from collections.abc import Sequence

from legacy_ddp._compare import compare_rows
from legacy_ddp._header import Header


def is_aligned(ranks: int, each: int) -> bool:
    """Whether so many ranks with so many micro-batches each add in the tree's order."""
    return each >= 1 and (ranks == 1 or each.bit_count() == 1)


def aligned_splits(total: int) -> list[tuple[int, int]]:
    """(ranks, micro-batches each) of ``total`` micro-batches that add in one order; fewest ranks first."""
    powers = (1 << power for power in range(total.bit_length()))
    return sorted({(1, total), *((total // each, each) for each in powers if total % each == 0)})


def say_splits(total: int) -> str:
    """The splits that do, in words."""
    splits = ", ".join(f"{ranks} x {each}" for ranks, each in aligned_splits(total))
    return f"splits of {total} that add in one order (ranks x each): {splits}"


def describe_bad_split(rows: Sequence[Header]) -> tuple[str, tuple[int, ...]]:
    """What is wrong with the split that the ranks bring, and which are at fault; empty if nothing.

    A rank that takes no part brings zeros, as many as the others.
    """
    ranks = [rank for rank, row in enumerate(rows) if row.takes_part]
    most = max((rows[rank].leaves for rank in ranks), default=0)
    finding = compare_rows([{"micro-batches": str(rows[rank].leaves)} for rank in ranks], ranks)
    if not most or (not finding and is_aligned(len(rows), most)):
        return "", ()
    total = len(rows) * most
    found = str(finding) if finding else f"  {most} on each of {len(rows)} ranks, which is no power of two"
    return (
        f"micro-batches are not shared out as a tree needs it:\n{found}\n{say_splits(total)}",
        finding.ranks,
    )
