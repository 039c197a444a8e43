"""Turns of loops in the operations of a rank. Pure."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from legacy_ddp.debug._operations.bits import keeps_bits
from legacy_ddp.debug._operations.operation import Operation

# A loop has at least as many computing operations in a turn, and at most.
_SHORTEST, _LONGEST = 3, 200


class Turns:
    """The operations of a rank that compute: in views the turns of a packed sequence differ."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        computing = [(index, item) for index, item in enumerate(operations) if not keeps_bits(item)]
        self._positions = [index for index, _ in computing]
        self._keys = [_key(item) for _, item in computing]

    def repeats(self, start: int, end: int) -> bool:
        """Whether the operations from ``start`` to ``end`` (exclusive) are copies of the operations directly before.

        Several copies may stand in a row. The alignment pairs the first turns of both sides, and leaves the last alone.
        """
        first, last = (bisect_left(self._positions, position) for position in (start, end))
        own = self._keys[first:last]
        lengths = (length for length in range(1, min(len(own), first) + 1) if len(own) % length == 0)
        return any(own == self._keys[first - length : last - length] for length in lengths)

    def has_loop(self, module: str) -> bool:
        """Whether the forward pass of the module runs a row of operations twice in succession."""
        names = [name for stage, path, name in self._keys if (stage, path) == ("forward", module)]
        for length in range(_SHORTEST, min(_LONGEST, len(names) // 2) + 1):
            equal = 0
            for name, later in zip(names, names[length:], strict=False):
                equal = equal + 1 if name == later else 0
                if equal == length:
                    return True
        return False

    def holds(self, operations: Iterable[Operation]) -> bool:
        """Whether every computing operation has its like here, at any place."""
        known = {*self._keys}
        return all(keeps_bits(item) or _key(item) in known for item in operations)


def _key(operation: Operation) -> tuple[str, str, str]:
    return operation.stage, operation.module, operation.name
