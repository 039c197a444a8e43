"""Alignment of two sequences of keys: common blocks, and blocks of which each sequence has items of its own. Pure."""

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

# Two sequences meet again where this many keys agree. One key alone would meet by chance: operations repeat.
_MEETING = 2
# Blocks with more items on both sides are not refined, because the time grows with the product.
_REFINED = 400


@dataclass(frozen=True)
class Block:
    """Items ``start_a`` to ``end_a`` (exclusive) of A beside items ``start_b`` to ``end_b`` of B.

    ``is_common``: the keys agree, one by one. Otherwise the items are of one sequence alone, and one side may be empty.
    """

    start_a: int
    end_a: int
    start_b: int
    end_b: int
    is_common: bool

    @property
    def pairs(self) -> Iterator[tuple[int, int]]:
        """The positions of paired items, of a common block."""
        return zip(range(self.start_a, self.end_a), range(self.start_b, self.end_b), strict=True)


def blocks(a: Sequence[Hashable], b: Sequence[Hashable]) -> Iterator[Block]:
    """The blocks in order, common blocks and others in turn.

    After a difference the sequences meet at the nearest place (fewest items skipped) with two equal keys on both sides,
    or at their ends. Time and memory are linear in the number of items.
    """
    i = j = 0
    meetings: _Meetings | None = None
    while i < len(a) or j < len(b):
        length = _common_length(a, i, b, j)
        if length:
            yield Block(i, i + length, j, j + length, is_common=True)
            i, j = i + length, j + length
        if i < len(a) or j < len(b):
            meetings = meetings or _Meetings(b)
            next_i, next_j = meetings.nearest(a, i, j)
            yield from _refined(a, b, Block(i, next_i, j, next_j, is_common=False))
            i, j = next_i, next_j


def _common_length(a: Sequence[Hashable], i: int, b: Sequence[Hashable], j: int) -> int:
    longest = min(len(a) - i, len(b) - j)
    return next((n for n in range(longest) if a[i + n] != b[j + n]), longest)


class _Meetings:
    """Positions in B by their next keys."""

    def __init__(self, b: Sequence[Hashable]) -> None:
        self._length = len(b)
        self._positions: dict[tuple[Hashable, ...], list[int]] = {}
        for j in range(len(b)):
            self._positions.setdefault(tuple(b[j : j + _MEETING]), []).append(j)

    def nearest(self, a: Sequence[Hashable], i: int, j: int) -> tuple[int, int]:
        """The positions from ``i`` and ``j`` on with equal next keys, and the fewest items before; or both ends."""
        best, fewest = (len(a), self._length), len(a) - i + self._length - j
        for p in range(i, len(a)):
            if p - i >= fewest:
                break
            positions = self._positions.get(tuple(a[p : p + _MEETING]), [])
            index = bisect_left(positions, j)
            if index < len(positions) and (skipped := p - i + positions[index] - j) < fewest:
                best, fewest = (p, positions[index]), skipped
        return best


def _refined(a: Sequence[Hashable], b: Sequence[Hashable], block: Block) -> Iterator[Block]:
    """The common items inside of a small block, which has single equal keys at most."""
    left, right = a[block.start_a : block.end_a], b[block.start_b : block.end_b]
    if max(len(left), len(right)) > _REFINED or not {*left} & {*right}:
        yield block
        return
    for tag, start_a, end_a, start_b, end_b in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        i, j = block.start_a, block.start_b
        yield Block(i + start_a, i + end_a, j + start_b, j + end_b, is_common=tag == "equal")
