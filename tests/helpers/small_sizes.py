"""Sizes of the library that a test sets in its process, so that small tensors take the paths of large ones.

A process with another size runs no further jobs (``tests/helpers/processes.py``).
"""

from legacy_ddp._call import broadcast, host_sum
from legacy_ddp._memory import plan

DEFAULT_CHUNK_NUMEL = host_sum.CHUNK_NUMEL


def move_gradients_from(size_bytes: int) -> None:
    """Gradients of this size and more move to their slots during backward."""
    plan.SMALLEST_BYTES = size_bytes


def sum_chunks_of(numel: int) -> None:
    """Sums in shared memory are made in chunks of ``numel`` elements."""
    host_sum.CHUNK_NUMEL = numel


def broadcast_chunks_of(size_bytes: int) -> None:
    """A broadcast sends chunks of about this size."""
    broadcast.CHUNK_BYTES = size_bytes
