"""Which splits of a step's micro-batches over ranks add them up in the same order? Pure.

Micro-batches are the leaves of a binary tree, and rank r of W with K each holds leaves r K to r K + K - 1. Its own sum
is a node of the tree if K is a power of two, or if there is no other rank.
"""


def is_aligned(ranks: int, each: int) -> bool:
    """Whether so many ranks with so many micro-batches each add in the tree's order."""
    return each >= 1 and (ranks == 1 or each.bit_count() == 1)


def aligned_splits(total: int) -> list[tuple[int, int]]:
    """(ranks, micro-batches each) of ``total`` micro-batches that add in one order; fewest ranks first."""
    powers = (1 << power for power in range(total.bit_length()))
    return sorted({(1, total), *((total // each, each) for each in powers if total % each == 0)})


def format_splits(total: int) -> str:
    """The splits that do, in words."""
    splits = ", ".join(f"{ranks} x {each}" for ranks, each in aligned_splits(total))
    return f"splits of {total} that add in one order (ranks x each): {splits}"
