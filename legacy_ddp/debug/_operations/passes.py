"""The passes of a step on one rank: common micro-batches of two ranks, and operations of the model itself. Pure."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from legacy_ddp.debug._operations.operation import Operation

READ_NUMBER = "aten::_local_scalar_dense"
"""The operation of ``item()``, ``int()`` and ``if`` on a tensor: later code may depend on data."""


def micro_batches(operations: Sequence[Operation]) -> int:
    """The number of micro-batches."""
    return max((item.micro_batch for item in operations), default=0)


def common_micro_batches(
    a: Sequence[Operation], b: Sequence[Operation]
) -> tuple[Sequence[Operation], Sequence[Operation]]:
    """The operations of both sides in micro-batches of both, without the operations between two micro-batches.

    With other numbers of micro-batches, a forward or backward pass without a counterpart is left out, too: one backward
    pass of several micro-batches counts as a part of the last.
    """
    numbers = micro_batches(a), micro_batches(b)
    if numbers[0] == numbers[1]:
        # Behind the last micro-batch stand the gradients' own operations, as a clipping of their norm.
        return _without_between(a, numbers[0]), _without_between(b, numbers[1])
    passes = {(item.micro_batch, item.stage) for item in a} & {(item.micro_batch, item.stage) for item in b}
    left, right = ([item for item in side if (item.micro_batch, item.stage) in passes] for side in (a, b))
    return _without_between(left, max(numbers)), _without_between(right, max(numbers))


def _without_between(operations: Sequence[Operation], last: int) -> list[Operation]:
    """Without the operations after the model's in all micro-batches before ``last``: a data loader's ``stack``."""
    found: list[Operation] = []
    for number, group in groupby(operations, key=lambda item: item.micro_batch):
        items = [*group]
        while number < last and items and not items[-1].module and items[-1].stage != "backward":
            items.pop()
        found += items
    return found


def of_model(operations: Sequence[Operation]) -> Iterator[Operation]:
    """The operations of forward passes, in submodules and between them, where the model's own code runs.

    The record does not tell the model's own code from code outside, as the loss. Between the first and the last
    submodule of a single forward pass is only the model. With several forward passes in a micro-batch, the first
    operation in a submodule comes again; then nothing between submodules counts.
    """
    forward = [item for item in operations if item.stage == "forward"]
    for _, group in groupby(forward, key=lambda item: item.micro_batch):
        items = [*group]
        inner = [index for index, item in enumerate(items) if item.module]
        is_single = [_place(items[index]) for index in inner].count(_place(items[inner[0]])) == 1 if inner else False
        for index, item in enumerate(items):
            if item.module or (is_single and inner[0] < index < inner[-1]):
                yield item


def after_read_number(operations: Sequence[Operation]) -> Iterator[Operation]:
    """The operations of each micro-batch after a number was read from a tensor."""
    for _, group in groupby(operations, key=lambda item: item.micro_batch):
        has_read = False
        for item in group:
            if has_read:
                yield item
            has_read = has_read or item.name == READ_NUMBER


def _place(operation: Operation) -> tuple[str, str]:
    return operation.module, operation.name
