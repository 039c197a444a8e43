"""The first difference between two ranks that ran the same step, each on data of its own. Pure."""

import re
from collections.abc import Callable, Sequence

from legacy_ddp.debug._operations.align import aligned, differing, gap_of, last_reader, sequence_difference
from legacy_ddp.debug._operations.describe import aspects, sizes
from legacy_ddp.debug._operations.difference import OperationDifference, Origin
from legacy_ddp.debug._operations.operation import Operation, Value

_NUMBER = re.compile(r"(?<![\w.])-?\d[\w.+-]*")
_DEVICE_INDEX = re.compile(r"\b([a-z]+):\d+")


def first_structural_difference(
    a: Sequence[Operation], b: Sequence[Operation], is_shared: Callable[[str], bool]
) -> OperationDifference | None:
    """The first difference which other data do not explain; None without any.

    Compared are the sequence of operations, the number, dtypes and dimensions of their tensors, their settings, and the
    bits of weights: inputs that are parameters or buffers with ``is_shared(name)``. Not compared are sizes, strides,
    all other bits and random generators. A number among the settings is compared in the forward pass of a module, for
    tensors of equal shapes: other numbers may be the size of a batch, or its number of tokens. Positions are in
    :func:`common_micro_batches`.
    """
    a, b = common_micro_batches(a, b)
    for block in aligned(a, b):
        if not block.is_common:
            return sequence_difference(gap_of(a, b, block), has_effect=None)
        for i, j in block.pairs:
            if _form(a[i], b[j]) != _form(b[j], a[i]):
                return OperationDifference("form", i, j, (a[i],), (b[j],), has_effect=None)
            if weights := _differing_weights(a[i], b[j], is_shared):
                name = a[i].parameters[weights[0]]
                origin = Origin(name, reader=last_reader(a, i, name))
                return OperationDifference("input", i, j, (a[i],), (b[j],), weights, origin)
    return None


def micro_batches(operations: Sequence[Operation]) -> int:
    """The number of micro-batches."""
    return max((item.micro_batch for item in operations), default=0)


def common_micro_batches(
    a: Sequence[Operation], b: Sequence[Operation]
) -> tuple[Sequence[Operation], Sequence[Operation]]:
    """The operations of both sides without micro-batches of one side alone.

    With other numbers of micro-batches, a forward or backward pass without a counterpart is left out, too: one backward
    pass of several micro-batches counts as a part of the last.
    """
    if micro_batches(a) == micro_batches(b):
        return a, b
    passes = {(item.micro_batch, item.stage) for item in a} & {(item.micro_batch, item.stage) for item in b}
    left, right = ([item for item in side if (item.micro_batch, item.stage) in passes] for side in (a, b))
    return left, right


def judge_structure(is_shared: Callable[[str], bool]) -> Callable[[Operation, Operation], str]:
    """The comparison of two operations at the same place, in words."""

    def judge(a: Operation, b: Operation) -> str:
        if _form(a, b) != _form(b, a):
            return f"{' and '.join(aspects(a, b, of_ranks=True))} differ"
        return "weights differ" if _differing_weights(a, b, is_shared) else "agrees"

    return judge


def _form(operation: Operation, other: Operation) -> tuple[object, ...]:
    """All of an operation that does not follow from data; ``other``: the operation of the other rank."""
    has_numbers = operation.module and operation.stage == "forward"
    has_equal_shapes = [value.kind for value in operation.inputs] == [value.kind for value in other.inputs]
    settings = _DEVICE_INDEX.sub(r"\1", operation.settings)
    if not (has_numbers and has_equal_shapes):
        settings = _NUMBER.sub("#", settings)
    tensors = tuple(map(_dtype_and_dimensions, operation.inputs)), tuple(map(_dtype_and_dimensions, operation.outputs))
    return operation.parameters, tensors, settings


def _dtype_and_dimensions(value: Value) -> tuple[str, int]:
    dtype, _, shape = value.kind.partition(" ")
    return dtype, len(sizes(shape))


def _differing_weights(a: Operation, b: Operation, is_shared: Callable[[str], bool]) -> tuple[int, ...]:
    """Positions of inputs that are shared and differ. Both operations read the same parameters."""
    found = differing(a.inputs, b.inputs)
    return tuple(index for index in found if a.parameters[index] and is_shared(a.parameters[index]))
