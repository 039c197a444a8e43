"""Influence of operations without a counterpart on the other operations of their side. Pure.

Two runs have the same data, so that values can be compared: :func:`with_influence` asks which of the operations may be
the cause of a difference. Ranks with data of their own have only the sequence: :meth:`Flow.influence` asks whether a
rank could have left the operations out, and tells gradients, views and scratch tensors apart.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from typing import Literal

from legacy_ddp.debug._operations.operation import Gap, Operation, Value


def with_influence(gaps: Sequence[Gap], a: Sequence[Operation], b: Sequence[Operation]) -> list[Gap]:
    """The gaps of A and B, with ``has_influence`` where an operation of the gap has influence.

    An operation has influence if it draws random numbers, writes in place, makes a view of a parameter or buffer (code
    may write through the view), computes from the backward pass on (the result may be a gradient), or if a later
    operation reads its output: an operation of both sequences, or one with influence. A view has no bits, and may read
    each output of its shape. A copy has no influence, because its bits were there before. Time and memory are linear.
    """
    of_a = [range(gap.start_a, gap.start_a + len(gap.a)) for gap in gaps]
    of_b = [range(gap.start_b, gap.start_b + len(gap.b)) for gap in gaps]
    in_a, in_b = _influential(a, {*chain(*of_a)}), _influential(b, {*chain(*of_b)})
    return [
        replace(gap, has_influence=not in_a.isdisjoint(own_a) or not in_b.isdisjoint(own_b))
        for gap, own_a, own_b in zip(gaps, of_a, of_b, strict=True)
    ]


def _influential(operations: Sequence[Operation], alone: Collection[int]) -> set[int]:
    """The positions among ``alone`` of operations with influence."""
    found: set[int] = set()
    read: set[str] = set()  # digests, and kinds of the inputs of views, behind the position
    for position in reversed(range(len(operations))):
        operation = operations[position]
        if position in alone:
            if not _has_influence(operation, read):
                continue
            found.add(position)
        read.update(value.digest or value.kind for value in operation.inputs)
    return found


def _has_influence(operation: Operation, read: Collection[str]) -> bool:
    given = {value.digest for value in operation.inputs}
    new = [value for value in operation.outputs if value.digest is not None and value.digest not in given]
    has_views = any(value.digest is None for value in operation.outputs)
    return (
        bool(operation.generator)
        or operation.may_write
        or (has_views and any(operation.parameters))
        or (operation.stage != "forward" and bool(new))
        or any(value.digest in read or value.kind in read for value in new)
    )


Influence = Literal["none", "state", "values"]
"""``values``: on values of the step. ``state``: only on a parameter or buffer, without a later reader in the step."""


class Flow:
    """Writers and readers of all digests of a rank. Memory is linear in the number of operations."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations
        # The first operation that produced a digest; None if it was an input first.
        self._made: dict[str | None, int | None] = {}
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
        if any(item.generator or (item.stage == "backward" and not item.passes_on) for item in own):
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
    if not operation.writes_in_place:
        return operation.may_write
    if not operation.inputs:
        return False
    made = [value for item in before if not item.is_view for value in item.outputs]
    return all((value.kind, value.digest) != (operation.inputs[0].kind, operation.inputs[0].digest) for value in made)


def _is_taken(value: Value, following: Iterable[Operation]) -> bool:
    """Whether an operation takes the value, or a value of this kind without a digest."""
    return any(
        given.kind == value.kind and (given.digest == value.digest or None in (given.digest, value.digest))
        for item in following
        for given in item.inputs
    )
