"""Threads of the watchdog, and tasks that run outside of the training thread."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from legacy_ddp._log import logger_of
from legacy_ddp._watchdog.client import ANSWER_SECONDS


class BackgroundTasks:
    """A thread per task, and a reserve thread for tasks when no more threads can be started.

    An error in a task is logged for ``rank`` and ends nothing else: training continues without the watchdog.

    Raises:
        OSError: the reserve thread cannot be started.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pending: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: end the reserve thread
        self._reserve = start_thread(self._run_all_pending)

    def submit(self, function: Callable[..., None], *args: object) -> None:
        """Call the function soon, in another thread."""
        task = partial(self._run, function, *args)
        try:
            _start(task)
        except RuntimeError:  # a limit of processes, or the interpreter is ending
            self._pending.put(task)

    def sleep_and_run_pending(self, seconds: float) -> None:
        """Sleep, then run a pending task: the calling thread may be waiting for the result."""
        time.sleep(seconds)
        with suppress(Empty):
            if task := self._pending.get_nowait():
                task()
            else:
                self._pending.put(None)

    def close(self) -> None:
        """End the reserve thread."""
        self._pending.put(None)
        if self._reserve is not threading.current_thread():
            self._reserve.join(ANSWER_SECONDS)

    def _run_all_pending(self) -> None:
        while task := self._pending.get():
            task()

    def _run(self, function: Callable[..., None], *args: object) -> None:
        try:
            function(*args)
        except Exception:  # noqa: BLE001 - no error of the watchdog may end training
            logger_of(self._rank).exception("a background task of the watchdog failed; training continues")


def start_thread(target: Callable[[], None]) -> threading.Thread:
    """Start a thread without which the watchdog cannot work.

    Raises:
        OSError: no thread can be started.
    """
    try:
        return _start(target)
    except RuntimeError as error:
        raise OSError(
            f"the watchdog needs two threads: got {str(error)!r}, expected room for both; raise the "
            'limit of processes and threads (ulimit -u, pids.max of the container), or pass checks="off"'
        ) from error


def _start(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name="legacy_ddp watchdog", daemon=True)
    thread.start()
    return thread
