"""Functions that run in every forked child before the code of the user does, and that no signal interrupts.

Python discards an exception in a hook of os.fork(), also the KeyboardInterrupt of a signal handler: the hook would end
half-way, and the interrupt would be lost. Therefore the forking thread blocks all signals from before the fork until
after the hooks. A signal that arrives meanwhile waits, and its handler runs after os.fork() in the process that the
signal was sent to. The hooks that block and unblock are functions in C: no handler can run in them, and the parent
runs no Python code of this module.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial

from legacy_ddp._text import wrap

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
