"""The operations that the ranks of a group do together."""

from enum import IntEnum


class Operation(IntEnum):
    """Everything that ranks do together; one header each."""

    CONSTRUCTION = 1
    BROADCAST_PARAMETERS = 2
    BROADCAST_BUFFERS = 3
    ALL_REDUCE = 4
    CHECK_REPLICAS = 5

    def __str__(self) -> str:
        return "construction" if self is Operation.CONSTRUCTION else f"{self.name.lower()}()"
