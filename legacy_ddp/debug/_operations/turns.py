"""Turns of loops in the operations of a rank. Pure."""

from bisect import bisect_left
from collections.abc import Sequence

from legacy_ddp.debug._operations.bits import keeps_bits
from legacy_ddp.debug._operations.operation import Operation


class Turns:
    """The operations of a rank that compute: in views the turns of a packed sequence differ."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        computing = [(index, item) for index, item in enumerate(operations) if not keeps_bits(item)]
        self._positions = [index for index, _ in computing]
        self._keys = [(item.stage, item.module, item.name) for _, item in computing]

    def repeats(self, start: int, end: int) -> bool:
        """Whether the operations from ``start`` to ``end`` (exclusive) are copies of the operations directly before.

        Several copies may stand in a row. The alignment pairs the first turns of both sides, and leaves the last alone.
        """
        first, last = (bisect_left(self._positions, position) for position in (start, end))
        own = self._keys[first:last]
        lengths = (length for length in range(1, min(len(own), first) + 1) if len(own) % length == 0)
        return any(own == self._keys[first - length : last - length] for length in lengths)
