"""The end of a process after an error: the error behind the end, and the order in which the processes end.

A launcher looks at its processes about ten times a second. It names the first process that has ended with an error,
and the lowest rank if several have ended since its last look. A rank that learned of the fault of another rank
therefore ends later than the process of that rank.

Python drops a SystemExit before it calls exit functions. Two facts remain. The outermost frame of the main thread shows
whether the script returned or an exception left it. And ``sys.exit()``, wrapped here, keeps the status and the line of
its last call.

A handler of the script may have stopped it after a signal. The signal is known if the handler called ``sys.exit()`` or
raised the error, or if a SIGTERM left stacks in the report file. Otherwise only the handlers of the script are known.
"""

import dis
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import cache, wraps
from traceback import walk_stack, walk_tb
from types import CodeType, FrameType
from typing import NamedTuple, NoReturn, TypeGuard

from legacy_ddp._log import line_in_script, script_lines
from legacy_ddp._text import error_line, error_text
from legacy_ddp._watchdog.process import ENDING, RUNNING, Identity, visible_state
from legacy_ddp._watchdog.reports import sigterm_has_come
from legacy_ddp._watchdog.status import AFTER_A_SIGNAL, LEFT_AFTER_LOSS, LEFT_NORMALLY


class _Exit(NamedTuple):
    status: object
    line: str
    signal: str  # whose handler made the call; or empty


_outermost: list[FrameType] = []  # of the main thread; one at most
_last_exit: list[_Exit] = []  # one at most
# Signals by which a user or a scheduler asks a process to end.
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
_HEAD_START_SECONDS = 1.0  # from the end of the awaited processes to the end of this process
_LIMIT_SECONDS = 10.0  # for a process that does not end: it may be in a debugger, or its script has caught the error
_PAUSE_SECONDS = 0.02
# In the texts of gloo and NCCL after the loss of a connection. A timeout says nothing about the end of a rank.
_TRANSPORT = ("gloo/transport", "Connection closed by peer", "remote process exited", "NCCL communicator was aborted")
_TIMEOUT = "Timed out"
_TURN = "_legacy_ddp_turn"


@cache
def watch_exit() -> None:
    """Wrap ``sys.exit()`` to remember its last call."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    if frame is not None:
        _outermost.append(frame)
    sys_exit = sys.exit

    @wraps(sys_exit)
    def keep_exit(status: object = None, /) -> NoReturn:
        stack = (frame.f_code for frame, _ in walk_stack(sys._getframe(1)))
        _last_exit[:] = [_Exit(status, next(iter(script_lines()), ""), _signal_of_handler(stack))]
        sys_exit(status)  # type: ignore[arg-type]  # Python takes any object

    sys.exit = keep_exit


def script_exit() -> SystemExit | None:
    """At the end of the process: a SystemExit with the status of the last ``sys.exit()``; None after another end."""
    if not any(map(_was_left_by_an_exception, _outermost)):
        return None
    # Without a call: the script left by `raise SystemExit`, or by the `exit()` of interactive sessions.
    return SystemExit(_last_exit[0].status if _last_exit else "its status is not known here")


def _was_left_by_an_exception(frame: FrameType) -> bool:
    running: FrameType | None = sys._getframe()
    while running is not None and running is not frame:
        running = running.f_back
    last = frame.f_code.co_code[frame.f_lasti]
    return running is None and not dis.opname[last].startswith("RETURN")


class _Turn:
    """Lets this process end one second after the last of ``processes``. Processes on other hosts cannot be seen."""

    def __init__(self, processes: Iterable[Identity]) -> None:
        self._running = list(processes)
        self._ended_at: float | None = None  # None: there were no processes
        self._look()

    def wait(self) -> None:
        deadline = time.monotonic() + _LIMIT_SECONDS
        while self._look() and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        now = time.monotonic()
        time.sleep(max(0.0, (self._ended_at or now) + _HEAD_START_SECONDS - now))

    def _look(self) -> bool:
        if self._running:
            launcher = os.getppid()  # not awaited: it may wait for this process
            states = [(process, visible_state(process)) for process in self._running if process.pid != launcher]
            self._running = [process for process, state in states if state in (RUNNING, ENDING)]
            self._ended_at = time.monotonic()
        return bool(self._running)


_last_turn: list[_Turn] = []  # one at most
forget_turn = _last_turn.clear  # for a script that goes on after the error


def end_after(error: BaseException, processes: Iterable[Identity]) -> None:
    """Let ``processes`` end before this process, if ``error``, or an error that came from it, ends this process.

    Also after a :class:`SystemExit`, and after an end for an unknown reason: a script may catch ``error``, and later
    call ``sys.exit()``.
    """
    vars(error)[_TURN] = turn = _Turn(processes)
    _last_turn[:] = [turn]


def await_turn(*, shows_exit: bool) -> None:
    """At the end of this process: wait for the processes that must end first.

    ``shows_exit``: if :func:`ending_error` is None, the process ends normally.
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


def has_shown_error() -> bool:
    """Whether Python has displayed the error that ends this process. From any thread; unlike :func:`ending_error`."""
    return getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")  # ps1: an interactive session


def is_of_transport(error: BaseException | None) -> bool:
    """Whether a lost connection of the script's own collectives ends this process: another rank has ended first."""
    texts = [error_text(link) for link in _chain(error) if isinstance(link, RuntimeError)]
    return any(any(mark in text for mark in _TRANSPORT) and _TIMEOUT not in text for text in texts)


def is_fault(reason: str) -> bool:
    """Whether a rank that ended for ``reason`` ended by an error of its own, and not as it was asked to."""
    return not was_asked(reason) and not reason.startswith((LEFT_NORMALLY, LEFT_AFTER_LOSS))


def was_asked(reason: str) -> bool:
    """Whether a rank that ended for ``reason`` was asked to end."""
    return AFTER_A_SIGNAL in reason or " with KeyboardInterrupt" in reason


def exit_reason(call: str) -> str:
    """How and where this process ends after ``call``, for other ranks.

    For example ``left after all_reduce() call 7 with ValueError: bad batch, at train.py:12 in main``.
    """
    error, last = ending_error(), script_exit()
    line = (line_in_script(error) if error is not None else "") or (_last_exit[0].line if last and _last_exit else "")
    at_line, signal_text = line and f"at {line}", _signal_text(error)
    if error is not None:
        how = f"exit status {error.code}" if _is_exit_code(error) else error_line(error)
        return f"left after {call} with {how}{at_line and f', {at_line}'}{signal_text}"
    how = f"by sys.exit({'' if last.code is None else last.code}) {at_line}" if last else "at the end of its script"
    return f"{LEFT_NORMALLY} after {call}, {how.rstrip()}{signal_text}"


def _signal_text(error: BaseException | None) -> str:
    """What is known of a signal before this end. ``error``: ends the process."""
    trace = error.__traceback__ if error is not None else None
    of_error = _signal_of_handler(frame.f_code for frame, _ in walk_tb(trace))
    of_exit = _last_exit[0].signal if _last_exit and script_exit() else ""
    if came := of_error or of_exit or ("SIGTERM" if sigterm_has_come() else ""):
        return f"{AFTER_A_SIGNAL}{came.removeprefix('SIG')}"
    handled = [request.name for request in _REQUESTS if _handler_code(request) is not None]
    if error is not None or not handled:
        return ""
    return f"; its script handles {' and '.join(handled)}"


def _signal_of_handler(running: Iterable[CodeType]) -> str:
    codes = {*running}
    return next((s.name for s in signal.Signals if _handler_code(s) in codes), "")


def _handler_code(number: signal.Signals) -> CodeType | None:
    """The code of the script's handler; None without a handler written in Python."""
    return getattr(signal.getsignal(number), "__code__", None)


def error_behind(error: BaseException) -> BaseException:
    """The error behind an exit code, as ``torch.multiprocessing`` makes one of an error; otherwise ``error``."""
    return next((link for link in _chain(error) if not _is_exit_code(link)), error)


def _is_exit_code(error: BaseException) -> TypeGuard[SystemExit]:
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
