"""The end of a process after an error: the error behind the end, and the order in which the processes end.

A launcher looks at its processes about ten times a second. It names the first process that has ended with an error,
and the lowest rank if several have ended since its last look. A rank that learned of the fault of another rank
therefore ends later than the process of that rank.

Python drops a SystemExit before it calls exit functions. Two facts stay. The outermost frame of the main thread shows
whether the script returned or was left by an exception. And ``sys.exit()``, wrapped here, keeps the status of its last
call.
"""

import dis
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import cache, wraps
from types import FrameType
from typing import NoReturn, TypeGuard

from legacy_ddp._text import error_line
from legacy_ddp._watchdog.client import RUNNING, Identity, state_of
from legacy_ddp._watchdog.missing import LEFT_NORMALLY

_outermost: list[FrameType] = []  # of the main thread; one at most
_last_status: list[object] = []  # of sys.exit(); one at most
# From the end of the awaited processes to the end of this process.
_HEAD_START_SECONDS = 1.0
# For a process that does not end: its rank may be in a debugger, or the script has caught the error.
_LIMIT_SECONDS = 10.0
_PAUSE_SECONDS = 0.02
_TURN = "_legacy_ddp_turn"


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


class _Turn:
    """Lets this process end one second after the last of ``processes``.

    Processes on other hosts cannot be seen. A process that launched this process is not awaited: it may wait, too.
    """

    def __init__(self, processes: Iterable[Identity]) -> None:
        self._running = list(processes)
        self._ended_at: float | None = None  # None: no process was known, or none was looked at
        self._look()

    def wait(self) -> None:
        """Wait until this process may end."""
        deadline = time.monotonic() + _LIMIT_SECONDS
        while self._look() and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        now = time.monotonic()
        time.sleep(max(0.0, (self._ended_at or now) + _HEAD_START_SECONDS - now))

    def _look(self) -> bool:
        """Whether a process is still running."""
        if self._running:
            launcher = os.getppid()
            states = [(process, state_of(process)) for process in self._running if process.pid != launcher]
            self._running = [process for process, state in states if state == RUNNING]
            self._ended_at = time.monotonic()
        return bool(self._running)


_last_turn: list[_Turn] = []  # one at most
forget_turn = _last_turn.clear  # the script has gone on after the error


def end_after(error: BaseException, processes: Iterable[Identity]) -> None:
    """Let ``processes`` end before this process, if ``error``, or an error that came from it, ends this process.

    They end first also after :class:`SystemExit`, and if the reason for the end is not known: a script may catch
    ``error``, and call ``sys.exit()`` later.
    """
    vars(error)[_TURN] = turn = _Turn(processes)
    _last_turn[:] = [turn]


def await_turn(*, shows_exit: bool) -> None:
    """At the end of this process: wait for the processes that must end first.

    ``shows_exit``: without an error of :func:`ending_error` the process ends normally.
    """
    error = ending_error()
    turns = [vars(link)[_TURN] for link in _chain(error) if _TURN in vars(link)]
    if isinstance(error, SystemExit) or (error is None and not shows_exit):
        turns += _last_turn
    for turn in turns[:1]:
        turn.wait()


def ending_error() -> BaseException | None:
    """The error that ends this process; None at a normal end."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    error = script_exit() if error is None else error_behind(error)
    return None if isinstance(error, SystemExit) and _is_success(error) else error


def end_text() -> str:
    """How this process ends, for other ranks: ``with ValueError: bad batch``, ``with exit status 3``, or normally."""
    error = ending_error()
    if error is None:
        return LEFT_NORMALLY
    return f"with exit status {error.code}" if _is_exit_code(error) else f"with {error_line(error)}"


def error_behind(error: BaseException) -> BaseException:
    """The error that was turned into an exit code, as ``torch.multiprocessing`` does; another error itself."""
    return next((link for link in _chain(error) if not _is_exit_code(link)), error)


def _is_exit_code(error: BaseException) -> TypeGuard[SystemExit]:
    """Whether ``error`` is a number that only says that the process failed."""
    return isinstance(error, SystemExit) and isinstance(error.code, int) and error.code != 0


def _is_success(error: SystemExit) -> bool:
    return error.code is None or (isinstance(error.code, int) and error.code == 0)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """``error``, and every error from which it came, the latest first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
