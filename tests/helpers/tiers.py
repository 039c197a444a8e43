"""Counts of repeated faults: a few in ``make test``, all in ``make soak``."""

import os
from collections.abc import Sequence
from typing import TypeVar

SOAK = "SOAK" in os.environ

T = TypeVar("T")


def count(full: int, usual: int) -> int:
    """``full`` in ``make soak``, else ``usual``."""
    return full if SOAK else usual


def choose(full: Sequence[T], usual: Sequence[T]) -> Sequence[T]:
    """The cases in ``make soak``, else ``usual``."""
    return full if SOAK else usual
