"""The operations that the ranks of a group call together."""

from enum import IntEnum


class Operation(IntEnum):
    """The kinds of calls; the value travels in the header."""

    label: str  # for error messages and reports, without a Python call

    CONSTRUCTION = 1, "construction"
    BROADCAST_PARAMETERS = 2, "broadcast_parameters()"
    BROADCAST_BUFFERS = 3, "broadcast_buffers()"
    ALL_REDUCE = 4, "all_reduce()"
    CHECK_REPLICAS = 5, "check_replicas()"
    CROSS_CHECK = 6, "cross_check()"

    def __new__(cls, value: int, label: str) -> "Operation":
        operation = int.__new__(cls, value)
        operation._value_, operation.label = value, label
        return operation

    def __str__(self) -> str:
        return self.label
