"""Division of tensors into parts of about equal cost, for digests in turns. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

MAX_PARTS = 16
SMALLEST_PART = 2**15  # bytes: less would save no time
TENSOR_COST = 2**14  # the cost of a tensor besides its bytes: a thousand small tensors go to all parts
_ALIGNMENT = 64


class Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` of the tensor with number ``tensor``."""

    tensor: int
    start: int
    stop: int


def divide(sizes: Sequence[int]) -> list[list[Piece]]:
    """At most ``MAX_PARTS`` parts, which together cover every byte of tensors with these ``sizes`` once.

    A large tensor is cut into pieces, at multiples of 64 bytes. Depends on the sizes alone: equal on all ranks.
    """
    total = sum(size + TENSOR_COST for size in sizes)
    count = max(1, min(MAX_PARTS, total // SMALLEST_PART))
    # With room for the cost of the two cuts of a part.
    share = total // count + 2 * TENSOR_COST + _ALIGNMENT
    parts: dict[int, list[Piece]] = {}
    used = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            part = used // share
            room = (part + 1) * share - used - TENSOR_COST
            if room < min(size - start, _ALIGNMENT):
                used = (part + 1) * share
                continue
            stop = size if room >= size - start else start + room - room % _ALIGNMENT
            parts.setdefault(part, []).append(Piece(index, start, stop))
            used += TENSOR_COST + stop - start
            start = stop
    return list(parts.values()) or [[]]
