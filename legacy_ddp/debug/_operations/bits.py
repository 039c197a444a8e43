"""Operations that compute nothing: views, and results with the bits of an input. Pure."""

from collections.abc import Iterable

from legacy_ddp.debug._operations.operation import Operation, Value


def digests(values: Iterable[Value]) -> set[str]:
    return {value.digest for value in values if value.digest is not None}


def is_view(operation: Operation) -> bool:
    """Whether no tensor has a digest, and the operation is no allocation."""
    values = (*operation.inputs, *operation.outputs)
    return bool(values) and not digests(values) and "empty" not in operation.name


def keeps_bits(operation: Operation) -> bool:
    """Whether the results are views, or have the bits of an input (``clone``, a sum over a single row)."""
    outputs = digests(operation.outputs)
    return is_view(operation) or (bool(outputs) and outputs <= digests(operation.inputs))


def passes_on(operation: Operation) -> bool:
    """Whether each result has bits, shape and layout of an input."""
    return keeps_bits(operation) and {*operation.outputs} <= {*operation.inputs}
