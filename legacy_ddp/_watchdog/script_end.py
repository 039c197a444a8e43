"""The SystemExit that ended the script, for exit functions: Python drops a SystemExit before it calls them.

Two facts stay. The outermost frame of the main thread shows whether the script returned or was left by an exception.
And ``sys.exit()``, wrapped here, keeps the status of its last call.
"""

import dis
import sys
import threading
from functools import cache, wraps
from types import FrameType
from typing import NoReturn

_outermost: list[FrameType] = []  # of the main thread; one at most
_last_status: list[object] = []  # of sys.exit(); one at most


@cache
def watch_exit() -> None:
    """From now on, remember the status of ``sys.exit()``."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    if frame is not None:
        _outermost.append(frame)
    sys_exit = sys.exit

    @wraps(sys_exit)
    def keep_status(status: object = None, /) -> NoReturn:
        _last_status[:] = [status]
        sys_exit(status)  # type: ignore[arg-type]  # Python takes any object

    sys.exit = keep_status


def script_exit() -> SystemExit | None:
    """At the end of the process: a SystemExit with the status of the last ``sys.exit()``; None after another end.

    The script may have left by ``raise SystemExit``, or by the ``exit()`` of interactive sessions: then the text says
    that the status is not known.
    """
    if not any(map(_was_left_by_an_exception, _outermost)):
        return None
    return SystemExit(*(_last_status or ["its status is not known here"]))


def _was_left_by_an_exception(frame: FrameType) -> bool:
    running: FrameType | None = sys._getframe()
    while running is not None and running is not frame:
        running = running.f_back
    last = frame.f_code.co_code[frame.f_lasti]
    return running is None and not dis.opname[last].startswith("RETURN")
