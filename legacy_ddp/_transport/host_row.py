"""The message of a rank on the star before a call: the segments of its flat tensors and sums, and its header. Pure."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

MAX_BUCKETS = 6  # one per supported dtype
MAX_SEGMENTS = 2 * MAX_BUCKETS

_SEGMENTS = struct.Struct(f"<?3x{MAX_SEGMENTS}I4x")


class SegmentIds(NamedTuple):
    """The serial numbers of a rank's segments.

    First one per host bucket, of its flat tensor; 0: ordinary memory. With ``reproducible=True`` then one per host
    bucket, of the sum of its micro-batches; 0: the sum lies in the flat tensor. ``has_spare``: the rank may come
    back to an earlier segment, and the other ranks keep it mapped.
    """

    serials: tuple[int, ...] = ()
    has_spare: bool = False


def encode_host_row(segments: SegmentIds, header: torch.Tensor) -> bytes:
    """56 bytes for the segments, then the words of the header (int64)."""
    padded = segments.serials + (0,) * (MAX_SEGMENTS - len(segments.serials))
    words = header.tolist()
    return _SEGMENTS.pack(segments.has_spare, *padded) + struct.pack(f"<{len(words)}q", *words)


def decode_host_rows(rows: Sequence[bytes]) -> tuple[list[SegmentIds], torch.Tensor]:
    """Inverse of :func:`encode_host_row` for the rows of all ranks; the headers have shape (size, words).

    Every rank gets ``MAX_SEGMENTS`` serial numbers.
    """
    segments, headers = [], []
    for row in rows:
        has_spare, *serials = _SEGMENTS.unpack_from(row)
        segments.append(SegmentIds(tuple(serials), has_spare))
        headers.append(struct.unpack_from(f"<{(len(row) - _SEGMENTS.size) // 8}q", row, _SEGMENTS.size))
    return segments, torch.tensor(headers, dtype=torch.int64, device="cpu")
