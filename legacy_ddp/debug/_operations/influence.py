"""Operations of a single sequence on which later operations depend. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from legacy_ddp.debug._operations.difference import Gap
from legacy_ddp.debug._operations.operation import Operation


def with_influence(gaps: Sequence[Gap], a: Sequence[Operation], b: Sequence[Operation]) -> list[Gap]:
    """The gaps of A and B, with ``has_influence`` where an operation of the gap has it.

    Influence has an operation that draws random numbers, writes in place, makes a view of a parameter or buffer (code
    may write through the view), computes from the backward pass on (the result may be a gradient), or has an output
    which a later operation reads: an operation of both sequences, or with influence. A view has no bits, and may read
    each output of its shape. A copy is without influence, because its bits were there before. Time and memory are
    linear.
    """
    in_a = _influential(a, {gap.start_a + index for gap in gaps for index in range(len(gap.a))})
    in_b = _influential(b, {gap.start_b + index for gap in gaps for index in range(len(gap.b))})
    return [
        replace(
            gap,
            has_influence=not in_a.isdisjoint(range(gap.start_a, gap.start_a + len(gap.a)))
            or not in_b.isdisjoint(range(gap.start_b, gap.start_b + len(gap.b))),
        )
        for gap in gaps
    ]


def writes_in_place(operation: Operation) -> bool:
    """Whether the name tells of a write to an input: ``aten::add_.Tensor``."""
    return operation.name.partition(".")[0].endswith("_")


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
    is_view = any(value.digest is None for value in operation.outputs)
    return (
        bool(operation.generator)
        or writes_in_place(operation)
        or "batch_norm" in operation.name  # writes the running statistics
        or (is_view and any(operation.parameters))
        or (operation.stage != "forward" and bool(new))
        or any(value.digest in read or value.kind in read for value in new)
    )
