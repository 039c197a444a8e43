"""What interrupts the code of the library: exceptions of signal handlers, and forks.

Python runs a signal handler between two bytecodes, so its exception may come between a change and the ``try`` that
undoes the change, or in the ``finally`` itself. Here are changes that are always undone, owners that have left, and
functions that run in every forked child before the code of the user does.

Python discards an exception in a hook of os.fork(), also the KeyboardInterrupt of a signal handler: the hook would end
half-way, and the interrupt would be lost. Therefore the forking thread blocks all signals from before the fork until
after the hooks. A signal that arrives meanwhile waits, and its handler runs after os.fork() in the process that the
signal was sent to. The hooks that block and unblock are functions in C: no handler can run in them, and the parent
runs no Python code of this module.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import FrameType
from typing import Generic, Protocol, TypeVar

from legacy_ddp._text import wrap


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
        return bool(self._holder)


_MASK_BYTES = 128  # of a sigset_t; at least what any C library takes
_EXIT_CODE = 1

_functions: list[Callable[[], None]] = []


def run_in_children(function: Callable[[], None]) -> None:
    """Call ``function`` in every child forked from now on. A child in which it raises ends, with a text on stderr."""
    if function not in _functions:  # an exception may have come after an earlier registration
        _functions.append(function)
    _register()


@cache
def _register() -> None:
    library = ctypes.PyDLL(None)  # keeps the GIL: no other thread runs in a hook
    every_signal = ctypes.create_string_buffer(_MASK_BYTES)
    library.sigfillset(every_signal)
    own_mask = _OwnMask()
    # Python calls the hooks "before" in reverse order. All signals that this thread sees are blocked by the first hook.
    unblock = partial(library.pthread_sigmask, signal.SIG_SETMASK, own_mask, None)
    block = partial(library.pthread_sigmask, signal.SIG_BLOCK, every_signal, own_mask)
    # Hooks cannot be removed: after an exception between the two, the first alone does no harm.
    os.register_at_fork(after_in_child=_run_all)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=unblock)


class _OwnMask(threading.local):
    """Memory for the mask of the calling thread, as an argument of C: several threads may fork at a time."""

    def __init__(self) -> None:
        self._as_parameter_ = ctypes.create_string_buffer(_MASK_BYTES)
        # The mask at present. If another hook of this very fork has registered these hooks, "block" was not called, and
        # "unblock" must not change the mask.
        ctypes.PyDLL(None).pthread_sigmask(signal.SIG_BLOCK, None, self._as_parameter_)


def _run_all() -> None:
    try:
        for function in _functions:
            function()
    except BaseException as error:  # noqa: BLE001 - Python would print it, and the child would go on
        try:
            _write(f"legacy_ddp: process {os.getpid()}, forked from process {os.getppid()}, ends here: {error}")
        finally:
            os._exit(_EXIT_CODE)


def _write(text: str) -> None:
    with suppress(OSError):
        os.write(2, "".join(f"{line}\n" for line in wrap(text)).encode())
