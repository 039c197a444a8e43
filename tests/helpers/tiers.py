"""What each command of tests runs: all cases of a table with ``make test-all``, all repetitions with ``make soak``."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

SOAK = "SOAK" in os.environ

T = TypeVar("T")


def count(full: int, usual: int) -> int:
    """``full`` in ``make soak``, else ``usual``."""
    return full if SOAK else usual


def choose(full: Sequence[T], usual: Sequence[T]) -> Sequence[T]:
    """The cases in ``make soak``, else ``usual``."""
    return full if SOAK else usual


def thorough(*values: Any) -> Any:
    """A case of a table that ``make test`` leaves out."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def thorough_but(chosen: Sequence[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases of a table; ``make test`` runs the ``chosen`` alone. A case of several arguments is a tuple."""
    table = list(cases)
    assert all(case in table for case in chosen), f"not in the table: {[case for case in chosen if case not in table]}"
    return [
        case if case in chosen else thorough(*case) if isinstance(case, tuple) else thorough(case) for case in table
    ]
