"""The message of a rank before a call, with stars: its segments (of flat tensors and sums) and its header. Pure."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

MAX_BUCKETS = 6  # one per supported dtype
MAX_SEGMENTS = 2 * MAX_BUCKETS

_SEGMENTS = struct.Struct(f"<?3x{MAX_SEGMENTS}I4x")
_SEGMENT_WORDS = struct.Struct(f"<{_SEGMENTS.size // 8}q")


class SegmentIds(NamedTuple):
    """The serial numbers of a rank's segments.

    First one per host bucket, of its flat tensor; 0: ordinary memory. With ``reproducible=True`` then one per host
    bucket, of the sum of its micro-batches; 0: the sum lies in the flat tensor. ``has_spare``: the rank may come
    back to an earlier segment, and the other ranks keep it mapped.
    """

    serials: tuple[int, ...] = ()
    has_spare: bool = False


def encode_host_row(segments: SegmentIds, header: torch.Tensor) -> bytes:
    """56 bytes for the segments, then the words of the header (int64): the message on a star."""
    words = header.tolist()
    return _pack(segments) + struct.pack(f"<{len(words)}q", *words)


def decode_host_rows(rows: Sequence[bytes]) -> tuple[list[SegmentIds], torch.Tensor]:
    """Inverse of :func:`encode_host_row` for the rows of all ranks; the headers have shape (size, words).

    Every rank gets ``MAX_SEGMENTS`` serial numbers.
    """
    segments, headers = [], []
    for row in rows:
        segments.append(_unpack(row))
        headers.append(struct.unpack_from(f"<{(len(row) - _SEGMENTS.size) // 8}q", row, _SEGMENTS.size))
    return segments, torch.tensor(headers, dtype=torch.int64, device="cpu")


def encode_host_words(segments: SegmentIds, header: torch.Tensor) -> torch.Tensor:
    """7 words for the segments, then the words of the header: the row on gloo, int64."""
    words = _SEGMENT_WORDS.unpack(_pack(segments))
    return torch.cat([torch.tensor(words, dtype=torch.int64, device="cpu"), header])


def decode_host_words(rows: torch.Tensor) -> tuple[list[SegmentIds], torch.Tensor]:
    """Inverse of :func:`encode_host_words` for the rows of all ranks, shape (size, words)."""
    count = _SEGMENTS.size // 8
    return [_unpack(_SEGMENT_WORDS.pack(*row)) for row in rows[:, :count].tolist()], rows[:, count:]


def _pack(segments: SegmentIds) -> bytes:
    padded = segments.serials + (0,) * (MAX_SEGMENTS - len(segments.serials))
    return _SEGMENTS.pack(segments.has_spare, *padded)


def _unpack(row: bytes) -> SegmentIds:
    has_spare, *serials = _SEGMENTS.unpack_from(row)
    return SegmentIds(tuple(serials), has_spare)
