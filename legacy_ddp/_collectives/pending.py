"""Collectives that a failed call has left behind: the process ends after them.

A collective that has begun cannot be taken back. When it ends, a thread of the process group runs what was to follow it
(``Future.then``), and needs the interpreter for that. Where the interpreter is ending by then, the process aborts.
"""

import atexit
import os
import threading
import time
from collections.abc import Iterable
from functools import cache

# A Future says that it has ended before that thread has dropped the last of what followed it.
_LAST_STEPS_SECONDS = 0.1

_pending: list[tuple[threading.Event, float]] = []


def end_before_exit(ends: Iterable[threading.Event], seconds: float) -> None:
    """Let the end of this process wait for all of ``ends``, but not longer than ``seconds`` from now."""
    give_up = time.monotonic() + seconds
    if left := [(end, give_up) for end in ends if not end.is_set()]:
        _pending.extend(left)
        _wait_at_exit()


@cache
def _wait_at_exit() -> None:
    atexit.register(_wait)
    os.register_at_fork(after_in_child=_pending.clear)  # the collectives are the parent's


def _wait() -> None:
    for end, give_up in _pending:
        end.wait(max(0.0, give_up - time.monotonic()))
    if _pending:
        time.sleep(_LAST_STEPS_SECONDS)
