"""What an exception of a signal handler leaves: changes that are always undone, and owners that have left.

Python runs a signal handler between two bytecodes, so its exception may come between a change and the ``try`` that
undoes the change, or in the ``finally`` itself.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Generic, Protocol, TypeVar


@contextmanager
def undone_by(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` at the end of the block; again, if an exception interrupts it.

    Make the change inside of the block. ``undo`` may be called without a change, and more than once.
    """
    try:
        try:
            yield
        finally:
            undo()
    finally:
        undo()


class Owned(Protocol):
    """An object that holds something for the function that has called its ``__enter__``, until ``__exit__``.

    ``thread``, ``frame``: of that function. ``__exit__`` sets ``frame`` to None: the variables of the function would
    otherwise live on.
    """

    thread: int
    frame: FrameType | None


def has_left(owned: Owned) -> bool:
    """Whether the function has returned, or was ended by an exception: between ``__enter__`` and the block, for
    example, or at the begin of ``__exit__``."""
    frame = sys._current_frames().get(owned.thread)
    while frame is not None and frame is not owned.frame:
        frame = frame.f_back
    return frame is None


T = TypeVar("T", bound=Owned)


class OwnedLock(Generic[T]):
    """A lock that names its holder, so that a holder whose function has left can be told from one that works."""

    def __init__(self) -> None:
        self._holder: dict[None, T] = {}  # one at most: setdefault() is one step for all threads

    def take(self, new: T) -> T:
        """The holder: ``new``, if nobody held the lock."""
        return self._holder.setdefault(None, new)

    def release(self, holder: T) -> None:
        """Let go, if ``holder`` holds the lock."""
        if self._holder.get(None) is holder:
            self._holder.pop(None, None)

    def locked(self) -> bool:
        """Whether anybody holds the lock."""
        return bool(self._holder)
