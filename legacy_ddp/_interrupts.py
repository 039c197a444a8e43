"""Exceptions of signal handlers, and forks: changes that are always undone, owners that left, hooks of every fork.

Python runs a signal handler between two bytecodes. Its exception may come between a change and the ``try`` that undoes
the change, or in the ``finally`` itself.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType
from typing import Generic, Protocol, TypeVar

from legacy_ddp._text import wrap


@contextmanager
def undone_by(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` at the end of the block; again, if an exception interrupts it.

    Make the change inside of the block: ``undo`` may also be called before the change.
    """
    try:
        try:
            yield
        finally:
            undo()
    finally:
        undo()


class Owned(Protocol):
    """An object that holds something for the function that called its ``__enter__``, until ``__exit__``.

    ``thread``, ``frame``: of that function. ``__exit__`` sets ``frame`` to None: a frame keeps its variables alive.
    """

    thread: int
    frame: FrameType | None


def has_left(owned: Owned) -> bool:
    """Whether the function has ended: perhaps by an exception between ``__enter__`` and the block, or at the beginning
    of ``__exit__``."""
    frame = sys._current_frames().get(owned.thread)
    while frame is not None and frame is not owned.frame:
        frame = frame.f_back
    return frame is None


T = TypeVar("T", bound=Owned)


class OwnedLock(Generic[T]):
    """A lock that knows its holder, so that :func:`has_left` can be asked about it."""

    def __init__(self) -> None:
        self._holder: dict[None, T] = {}  # one at most: setdefault() is one step for all threads

    def take(self, new: T) -> T:
        """Take the lock for ``new`` if it is free. Returns the holder."""
        return self._holder.setdefault(None, new)

    def release(self, holder: T) -> None:
        if self._holder.get(None) is holder:
            self._holder.pop(None, None)

    def locked(self) -> bool:
        return bool(self._holder)


_MASK_BYTES = 128  # of a sigset_t; at least what any C library takes
_functions: list[Callable[[], None]] = []


def run_in_children(function: Callable[[], None]) -> None:
    """Call ``function`` in every child forked from now on, before the code of the user runs there. If it raises, the
    child ends, with a text on stderr."""
    if function not in _functions:  # an exception may have come after an earlier registration
        _functions.append(function)
    _register()


@cache
def _register() -> None:
    """Let every fork call ``_run_all`` in the child, and block all signals of the forking thread around all hooks.

    Python discards an exception in a hook of os.fork(), also the KeyboardInterrupt of a signal handler: the hook would
    end half-way, and the interrupt would be lost. A blocked signal waits, and its handler runs after os.fork(), in the
    process that the signal was sent to. The hooks that block and unblock are functions in C: no handler runs in them.
    """
    library = ctypes.PyDLL(None)  # keeps the GIL: no other thread runs in a hook
    every_signal = ctypes.create_string_buffer(_MASK_BYTES)
    library.sigfillset(every_signal)
    own_mask = _OwnMask()
    unblock = partial(library.pthread_sigmask, signal.SIG_SETMASK, own_mask, None)
    block = partial(library.pthread_sigmask, signal.SIG_BLOCK, every_signal, own_mask)
    # Hooks in the child run in the order of registration: signals are still blocked in _run_all. Two calls, because
    # hooks cannot be removed: after an exception between the two, the first alone does no harm.
    os.register_at_fork(after_in_child=_run_all)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=unblock)


class _OwnMask(threading.local):
    """Memory for the mask of the calling thread, as an argument of C. Several threads may fork at a time."""

    def __init__(self) -> None:
        self._as_parameter_ = ctypes.create_string_buffer(_MASK_BYTES)
        # The present mask: if another hook of this very fork registered these hooks, "unblock" runs without "block",
        # and must not change the mask.
        ctypes.PyDLL(None).pthread_sigmask(signal.SIG_BLOCK, None, self._as_parameter_)


def _run_all() -> None:
    try:
        for function in _functions:
            function()
    except BaseException as error:  # noqa: BLE001 - Python would print it, and the child would go on
        try:
            text = f"legacy_ddp: process {os.getpid()}, forked from process {os.getppid()}, ends here: {error}"
            os.write(2, "".join(f"{line}\n" for line in wrap(text)).encode())
        finally:
            os._exit(1)
