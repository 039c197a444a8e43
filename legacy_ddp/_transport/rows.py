"""What a rank sends before a call on a host: the operation, its segments of memory, and its header. Pure."""

import struct
from collections.abc import Sequence
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


def encode_host_row(segments: SegmentIds, header: bytes) -> bytes:
    """56 bytes for the segments, then the header."""
    padded = segments.serials + (0,) * (MAX_SEGMENTS - len(segments.serials))
    return _SEGMENTS.pack(segments.has_spare, *padded) + header


def decode_host_rows(rows: Sequence[bytes]) -> tuple[list[SegmentIds], list[bytes]]:
    """Inverse of :func:`encode_host_row` for the rows of all ranks. Every rank gets ``MAX_SEGMENTS`` serial numbers."""
    size = _SEGMENTS.size
    segments: list[SegmentIds] = []
    headers: list[bytes] = []
    for row in rows:
        segments.append(_decode_segments(row[:size]))
        headers.append(row[size:])
    return segments, headers


@lru_cache(maxsize=1024)  # the segments of a rank are the same in most calls
def _decode_segments(row: bytes) -> SegmentIds:
    has_spare, *serials = _SEGMENTS.unpack(row)
    return SegmentIds(tuple(serials), has_spare)
