"""Who handles a signal below Python."""

import ctypes
import faulthandler
import os
import signal

# Not signal.getsignal(), which knows handlers of Python alone.
_handler_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(("PyOS_getsig", ctypes.pythonapi))
_NOBODY = (None, int(signal.SIG_IGN))
_NOT_HANDLED_BY_ANYBODY = (signal.SIGKILL, signal.SIGSTOP)


def is_faulthandler_s(number: int) -> bool:
    """Whether faulthandler handles the signal, for whoever registered it.

    It cannot be asked, and to register again would take its file from who did. But its handler is one function for all
    signals: a signal that is free for the moment shows which.
    """
    handler = _handler_of(number)
    if handler in _NOBODY:
        return False
    signals = sorted(signal.valid_signals() - {*_NOT_HANDLED_BY_ANYBODY}, reverse=True)  # the seldom used ones first
    free = next(other for other in signals if _handler_of(other) is None)
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        faulthandler.register(free, file=nowhere)
        its_handler = _handler_of(free)
        faulthandler.unregister(free)
    finally:
        os.close(nowhere)
    return bool(handler == its_handler)
