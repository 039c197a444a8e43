"""Threads of the watch, and work for them that nobody waits for."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from legacy_ddp._log import logger_of
from legacy_ddp._watchdog.client import ANSWER_SECONDS


class Background:
    """One thread per piece of work, and one thread in reserve for where no more can be started.

    An error in a piece of work is in the log of ``rank`` and ends nothing else: training goes on without the watch.

    Raises:
        OSError: the thread in reserve cannot be started.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._left: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: the end
        self._reserve = start_thread(self._do_what_is_left)

    def do(self, function: Callable[..., None], *args: object) -> None:
        """Call the function soon, not here."""
        work = partial(self._attempt, function, *args)
        try:
            _start(work)
        except RuntimeError:  # a limit of processes, or the interpreter is ending
            self._left.put(work)

    def help(self, seconds: float) -> None:
        """Sleep; then do a piece of work that no thread was there for: who sleeps may wait for what comes of it."""
        time.sleep(seconds)
        with suppress(Empty):
            if work := self._left.get_nowait():
                work()
            else:
                self._left.put(None)

    def close(self) -> None:
        """End the thread in reserve."""
        self._left.put(None)
        if self._reserve is not threading.current_thread():
            self._reserve.join(ANSWER_SECONDS)

    def _do_what_is_left(self) -> None:
        while work := self._left.get():
            work()

    def _attempt(self, function: Callable[..., None], *args: object) -> None:
        try:
            function(*args)
        except Exception:  # noqa: BLE001 - whatever it is
            logger_of(self._rank).exception("looking after the other ranks failed")


def start_thread(target: Callable[[], None]) -> threading.Thread:
    """A thread that the watch cannot do without.

    Raises:
        OSError: no thread can be started.
    """
    try:
        return _start(target)
    except RuntimeError as error:
        raise OSError(
            f"the watch of the other ranks needs two threads: got {str(error)!r}, expected room for both; raise the "
            'limit of processes and threads (ulimit -u, pids.max of the container), or pass checks="off"'
        ) from error


def _start(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name="legacy_ddp watch", daemon=True)
    thread.start()
    return thread
