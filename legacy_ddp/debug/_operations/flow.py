"""The flow of values through the operations of a rank: results without a use in the step. Pure."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Literal

from legacy_ddp.debug._operations.bits import is_view, passes_on
from legacy_ddp.debug._operations.operation import Operation, Value

Influence = Literal["none", "state", "values"]
"""``values``: on values of the step. ``state``: on a parameter or buffer alone, without a later reader in the step."""


class Flow:
    """Writers and readers of all digests of a rank. Memory is linear in the number of operations."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations
        self._made: dict[str | None, int | None] = {}  # by the operation; None: it was there before
        self._reads: dict[str | None, list[int]] = defaultdict(list)
        self._writes: dict[str | None, list[int]] = defaultdict(list)
        for position, item in enumerate(operations):
            for value in item.inputs:
                self._made.setdefault(value.digest, None)
                self._reads[value.digest].append(position)
            for value in item.outputs:
                self._made.setdefault(value.digest, position)
                self._writes[value.digest].append(position)

    def influence(self, start: int, end: int) -> Influence:
        """The influence of the operations from ``start`` to ``end`` (exclusive) on the others.

        Without influence are reads of a number (``item()``), results with earlier bits (``clone``), and results with
        readers only inside of the range. A view has no digest: an unread result may reach later operations of the
        forward pass by a view of its shape. From the backward pass on, an unread tensor may be a gradient; an unread
        scalar has no influence. Random draws and computing operations of the backward pass always have influence.
        """
        own = self._operations[start:end]
        if any(item.generator or (item.stage == "backward" and not passes_on(item)) for item in own):
            return "values"
        writes = [_writes_outside(item, own[:index]) for index, item in enumerate(own)]
        if not all(any(item.parameters) for item, is_write in zip(own, writes, strict=True) if is_write):
            return "values"
        for index, item in enumerate(own):
            for value in item.outputs:
                is_unread = not writes[index] and not _is_taken(value, own[index + 1 :])
                if self._is_read_later(value, start, end) or (is_unread and self._may_matter(value, item, start, end)):
                    return "values"
        return "state" if any(writes) else "none"

    def _is_new(self, value: Value, start: int) -> bool:
        made = self._made[value.digest]
        return value.digest is not None and made is not None and made >= start

    def _is_read_later(self, value: Value, start: int, end: int) -> bool:
        """Whether an operation from ``end`` on reads the new bits, before a later operation returns equal bits."""
        reads, writes = self._reads.get(value.digest, []), self._writes.get(value.digest, [])
        read, written = bisect_left(reads, end), bisect_left(writes, end)
        is_first = read < len(reads) and (written == len(writes) or reads[read] <= writes[written])
        return self._is_new(value, start) and is_first

    def _may_matter(self, value: Value, operation: Operation, start: int, end: int) -> bool:
        """Whether an unread result may have a use: as a gradient, or through a view."""
        if value.digest is None:
            return value not in operation.inputs
        if not self._is_new(value, start) or value.kind.endswith(" ()"):
            return False
        later = self._operations[end:]
        same_pass = [*takewhile(lambda item: _pass(item) == _pass(operation), later)]
        has_backward = len(same_pass) < len(later) and later[len(same_pass)].micro_batch == operation.micro_batch
        return not has_backward or any(
            given.digest is None and given.kind == value.kind for item in same_pass for given in item.inputs
        )


def _pass(operation: Operation) -> tuple[int, str]:
    return operation.micro_batch, operation.stage


def _writes_outside(operation: Operation, before: Sequence[Operation]) -> bool:
    """Whether the operation writes to a tensor from outside of the operations ``before``."""
    name = operation.name.partition(".")[0]
    if "batch_norm" in name:
        return True  # running statistics
    if not name.endswith("_") or not operation.inputs:
        return False
    made = [value for item in before if not is_view(item) for value in item.outputs]
    return all((value.kind, value.digest) != (operation.inputs[0].kind, operation.inputs[0].digest) for value in made)


def _is_taken(value: Value, following: Iterable[Operation]) -> bool:
    """Whether an operation takes the value, or a value of this kind without a digest."""
    return any(
        given.kind == value.kind and (given.digest == value.digest or None in (given.digest, value.digest))
        for item in following
        for given in item.inputs
    )
