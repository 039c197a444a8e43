"""What a rank sends before a call beside its header: the operation, and its segments of memory. Pure."""

import struct
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

MAX_BUCKETS = 6  # one per supported dtype
MAX_SEGMENTS = 2 * MAX_BUCKETS


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


_SEGMENTS = struct.Struct(f"<?3x{MAX_SEGMENTS}I4x")


class SegmentIds(NamedTuple):
    """The serial numbers of a rank's segments.

    First one per host bucket, of its flat tensor; 0: ordinary memory. With ``reproducible=True`` then one per host
    bucket, of the sum of its micro-batches; 0: the sum lies in the flat tensor. ``has_spare``: the rank may come
    back to an earlier segment, and the other ranks keep it mapped.
    """

    serials: tuple[int, ...] = ()
    has_spare: bool = False


@lru_cache(maxsize=16)  # most calls have the segments of the call before
def encode_segments(segments: SegmentIds) -> bytes:
    """56 bytes."""
    padded = segments.serials + (0,) * (MAX_SEGMENTS - len(segments.serials))
    return _SEGMENTS.pack(segments.has_spare, *padded)


def decode_segments(column: bytes) -> list[SegmentIds]:
    """Inverse of :func:`encode_segments`, for the bytes of all ranks. Every rank gets ``MAX_SEGMENTS`` serials."""
    return [SegmentIds(tuple(serials), has_spare) for has_spare, *serials in _SEGMENTS.iter_unpack(column)]
