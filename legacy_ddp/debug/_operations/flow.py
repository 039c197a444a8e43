"""Influence of operations without a counterpart on the other operations of their side. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain

from legacy_ddp.debug._operations.operation import Gap, Operation


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
