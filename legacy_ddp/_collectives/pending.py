"""Pending collectives of a failed call: the process waits for them before its exit.

A started collective cannot be cancelled. When the collective ends, a thread of the process group runs its callbacks
(``Future.then``), which need the interpreter. If the interpreter is finalizing at that time, the process aborts.
"""

import atexit
import threading
import time
from collections.abc import Iterable
from functools import cache

from legacy_ddp._fork import run_in_children

# A Future reports its end before that thread has released the last callback.
_RELEASE_SECONDS = 0.1

_pending: list[tuple[threading.Event, float]] = []


def wait_before_exit(ends: Iterable[threading.Event], seconds: float) -> None:
    """Delay the exit of this process until all of ``ends`` are set, at most ``seconds`` from now."""
    deadline = time.monotonic() + seconds
    if left := [(end, deadline) for end in ends if not end.is_set()]:
        _pending.extend(left)
        _wait_at_exit()


@cache
def _wait_at_exit() -> None:
    atexit.register(_wait)
    run_in_children(_pending.clear)  # the collectives are the parent's


def _wait() -> None:
    for end, deadline in _pending:
        end.wait(max(0.0, deadline - time.monotonic()))
    if _pending:
        time.sleep(_RELEASE_SECONDS)
