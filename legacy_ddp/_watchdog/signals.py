"""Signal handlers below Python, in C."""

import ctypes
import faulthandler
import os
import signal

# Not signal.getsignal(), which returns only handlers written in Python.
_handler_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(("PyOS_getsig", ctypes.pythonapi))
_NO_HANDLER = (None, int(signal.SIG_IGN))
_CANNOT_BE_HANDLED = (signal.SIGKILL, signal.SIGSTOP)


def is_faulthandler_registered(number: int) -> bool:
    """Whether faulthandler handles the signal ``number``.

    faulthandler has no query, and a second registration would replace the file of the first. But faulthandler's handler
    is one C function for all signals: registering a free signal for a moment gives the address for the comparison.
    """
    handler = _handler_of(number)
    if handler in _NO_HANDLER:
        return False
    signals = sorted(signal.valid_signals() - {*_CANNOT_BE_HANDLED}, reverse=True)  # rarely used signals first
    free = next(other for other in signals if _handler_of(other) is None)
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        faulthandler.register(free, file=null)
        faulthandlers_own = _handler_of(free)
        faulthandler.unregister(free)
    finally:
        os.close(null)
    return bool(handler == faulthandlers_own)
