"""Sizes of the library that a test sets in its process, so that small tensors take the paths of large ones.

A process with another size runs no further jobs (``tests/helpers/processes.py``).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from legacy_ddp._call import broadcast, host_sum
from legacy_ddp._memory import flat_buffer, plan

DEFAULT_CHUNK_NUMEL = host_sum.CHUNK_NUMEL
SMALLEST_MOVED_BYTES = plan.SMALLEST_BYTES  # of a gradient that moves to its slot during backward


def move_gradients_from(size_bytes: int) -> None:
    """Gradients of this size and more move to their slots during backward."""
    plan.SMALLEST_BYTES = size_bytes


def sum_chunks_of(numel: int) -> None:
    """Sums in shared memory are made in chunks of ``numel`` elements."""
    host_sum.CHUNK_NUMEL = numel


def broadcast_chunks_of(size_bytes: int) -> None:
    broadcast.CHUNK_BYTES = size_bytes


def before_each_flat_tensor(act: Callable[[], object]) -> AbstractContextManager[object]:
    """``act`` runs before the memory of each flat tensor is made, and may raise."""
    make = flat_buffer.SlotViews

    def acted(*arguments: Any) -> Any:
        act()
        return make(*arguments)

    return patch.object(flat_buffer, "SlotViews", acted)
