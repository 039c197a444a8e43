"""The operations behind the backward pass of a micro-batch. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from legacy_ddp.debug._operations.operation import Operation


def with_after_backward(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """The operations of a step; outside of modules and behind the last backward operation of their micro-batch the
    stage is ``after backward``.
    """
    last = {item.micro_batch: index for index, item in enumerate(operations) if item.stage == "backward"}
    return tuple(
        [
            replace(item, stage="after backward")
            if _is_outside(item) and index > last.get(item.micro_batch, index)
            else item
            for index, item in enumerate(operations)
        ]
    )


def _is_outside(operation: Operation) -> bool:
    return operation.stage == "forward" and not operation.module
