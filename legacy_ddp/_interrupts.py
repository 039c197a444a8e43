"""What an exception of a signal handler leaves: changes that are always undone, and owners that have left.

Python runs a signal handler between two bytecodes, so its exception may come between a change and the ``try`` that
undoes the change, or in the ``finally`` itself.
"""

import sys
import threading
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


class Owner:
    """The function that calls ``__enter__`` of an object, as the owner of what the object holds until its ``__exit__``.

    An exception between ``__enter__`` and the block, or at the begin of ``__exit__``, makes it leave without the end.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._frame: FrameType | None = sys._getframe(2)

    def has_left(self) -> bool:
        """Whether the function has returned, or was ended by an exception."""
        frame = sys._current_frames().get(self.thread)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is None

    def forget(self) -> None:
        """Forget the function, whose variables would otherwise live on."""
        self._frame = None


class Owned(Protocol):
    """An object with an :class:`Owner`."""

    owner: Owner


T = TypeVar("T", bound=Owned)


class OwnedLock(Generic[T]):
    """A lock that names its holder, so that a holder whose owner has left can be told from one that works."""

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
