"""The reports of a rank on waiting or failed calls: when they go to the log, and the report file of the process.

The file also takes the stacks at a SIGTERM, whose handler is below Python, in C.
"""

import ctypes
import errno
import faulthandler
import json
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from legacy_ddp._log import logger_of
from legacy_ddp._text import how_to_explain, printable, printable_lines

# Not signal.getsignal(), which returns only handlers written in Python.
_handler_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(("PyOS_getsig", ctypes.pythonapi))
_NO_HANDLER = (None, int(signal.SIG_IGN))
_CANNOT_BE_HANDLED = (signal.SIGKILL, signal.SIGSTOP)
_CLOSED = -1
_NO_PART_OF_A_NAME = re.compile(r"[^\w.-]")  # of a file; a host may have any name


def sigterm_has_come() -> bool:
    """Whether a SIGTERM has left stacks in a report file, and this process has gone on. False if not known."""
    return bool(_sigterm_came) or any(file.has_stacks() for file in _open)


def is_faulthandler_registered(number: int) -> bool:
    """Whether faulthandler handles the signal ``number``."""
    # faulthandler does not tell, and a second registration would replace the file of the first. But its handler is one
    # C function for all signals: a short registration for a free signal gives the address for a comparison.
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


_open: "list[ReportFile]" = []  # of this process, the newest last
_sigterm_came: list[bool] = []  # True, once a closed file had stacks


class ReportFile:
    """A file for reports. :meth:`close` removes it if no report was written.

    It is open from the start, because a process that ends may have time for only one write. Only the owner can read
    it, because stacks name files and functions. ``directory=None``: the directory for temporary files; if no file can
    be made there, ``path`` is the null device.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, rank: int, size: int) -> None:
        host = printable(socket.gethostname())
        stem = f"legacy_ddp-{_NO_PART_OF_A_NAME.sub('_', host)}-rank{rank}-pid{os.getpid()}"
        self._owner = os.getpid()
        self._is_empty = True
        self._own_bytes = 0  # the other bytes of the file are stacks
        self.path, self._descriptor, self._no_file = _open_file(directory, stem, rank)
        self._problem = self._no_file  # why the last report is not in the file; empty if it is
        head = f"rank {rank} of {size}, process {os.getpid()} on {host}\n({_stacks_note(rank)})"
        with suppress(OSError):  # a full disk is no reason not to train
            self._write(head)
        _open.append(self)
        _dump_stacks_into_newest()

    def append(self, text: str) -> bool:
        """Append a report with one write: after a kill the file holds all of the report or nothing of it.

        Returns whether the report is in the file. If not, for example on a full disk, log the text. True after
        :meth:`close`.
        """
        if self._descriptor == _CLOSED:  # other ranks report the end of this rank, also to this rank
            return True
        self._problem = self._no_file
        try:
            self._write(text)
        except OSError as error:
            if self._descriptor == _CLOSED:  # meanwhile, by the thread that ends the process
                return True
            self._problem = f"not written in full to {self.path}: {error.strerror}"
        self._is_empty = self._is_empty and bool(self._problem)
        return not self._problem

    def where(self, prefix: str) -> str:
        """``prefix`` and the path; or the reason alone, if the last report is not in the file."""
        return printable(self._problem or f"{prefix} {self.path}")

    def close(self) -> None:
        """Close the file; remove an empty file. Later stacks go to the next newest open file, if any."""
        if self._descriptor == _CLOSED or os.getpid() != self._owner:
            return
        if self.has_stacks():
            _sigterm_came[:] = [True]
        if self._is_empty and self.path != Path(os.devnull):
            with suppress(OSError):
                self.path.unlink()
        _open.remove(self)
        _dump_stacks_into_newest()
        descriptor, self._descriptor = self._descriptor, _CLOSED  # the number may soon belong to another file
        os.close(descriptor)

    def has_stacks(self) -> bool:
        try:
            return self._descriptor != _CLOSED and os.fstat(self._descriptor).st_size > self._own_bytes
        except OSError:
            return False

    def after_fork(self) -> None:
        """In a forked child: redirect reports and stacks to the null device; the file is the parent's."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, _stacks_descriptor())
        if self._descriptor != _CLOSED:
            os.dup2(null, self._descriptor)
        os.close(null)

    def _write(self, text: str) -> None:
        data = f"[{datetime.now().astimezone().isoformat(' ', 'seconds')}]\n{printable_lines(text)}\n\n".encode()
        while data:  # a disk that gets full first takes a part of the data, then raises
            written = os.write(self._descriptor, data)
            data = data[written:]
            self._own_bytes += written


def _open_file(directory: str | os.PathLike[str] | None, stem: str, rank: int) -> tuple[Path, int, str]:
    """Create a file for reports. Returns its path and descriptor, and an empty text.

    If no file can be made in the default directory, they are those of the null device, and the text is the reason.
    """
    try:
        folder = Path(tempfile.gettempdir() if directory is None else directory).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return (*_create(folder, stem), "")
    except OSError as error:
        if directory is not None:
            raise OSError(
                f"report_dir is not usable: got {str(directory)!r} ({error.strerror}), expected a directory to "
                "write to; pass another one with Checks(report_dir=...) or LEGACY_DDP_CHECKS=report_dir=..."
            ) from error
        text = "no reports on disk: %s; pass Checks(report_dir=...), or set LEGACY_DDP_CHECKS=report_dir=...\n%s"
        logger_of(rank).warning(text, error, how_to_explain("No reports on disk"), extra={"event": "report_file"})
        return Path(os.devnull), os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), f"not on disk: {error}"


def _create(folder: Path, stem: str) -> tuple[Path, int]:
    """Create a new file. Never opens an existing one: all users may be able to write to the directory."""
    for attempt in range(1000):
        path = folder / (f"{stem}.txt" if attempt == 0 else f"{stem}-{attempt}.txt")
        with suppress(FileExistsError):
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    raise FileExistsError(errno.EEXIST, f"1000 files {stem}-*.txt exist; remove them")


def _dump_stacks_into_newest() -> None:
    """Let faulthandler write to the newest open file. A launcher ends the other ranks after a failure with SIGTERM."""
    # After the last file was closed, its copy stays: for a process that hangs at its exit.
    if _open:
        os.dup2(_open[-1]._descriptor, _stacks_descriptor(), inheritable=False)


def _stacks_note(rank: int) -> str:
    """Register faulthandler; the line about stacks in the head of the file."""
    if _register_stacks():
        return "stacks without a date below were left by a SIGTERM that ended this process"
    note = "a SIGTERM leaves no stacks here: faulthandler was registered for it before, with a file of its own"
    logger_of(rank).info("in reports of this rank, %s", note, extra={"event": "report_file"})
    return note


@cache
def _register_stacks() -> bool:
    """Register faulthandler to write stacks at a SIGTERM; False if the user's code registered it before.

    Its handler is C code that works in any state of Python, and then calls the previous handler.
    """
    if is_faulthandler_registered(signal.SIGTERM):
        return False
    # Never unregistered: this would also remove a handler that the user has set later.
    faulthandler.register(signal.SIGTERM, file=_stacks_descriptor(), all_threads=True, chain=True)
    return True


@cache
def _stacks_descriptor() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


_REPORTS = "reports of this rank:"
_DELAY_SECONDS = 5.0  # from the poll to the log, on a crowded machine
_SECTION = "Ranks have waited"


@dataclass(frozen=True)
class Report:
    """A text for all ranks, and the missing ranks."""

    head: str  # the first lines of `text`, unwrapped
    text: str
    summary: str  # the missing ranks and their activity; equal in two reports if nothing has changed
    missing: tuple[int, ...]
    reporters: tuple[int, ...]  # a rank of each host that shows the report there, if possible a waiting rank
    is_progressing: bool = False  # all missing ranks make progress
    is_busy: bool = False  # all missing ranks make progress or compute, perhaps in a loop
    is_late: bool = False  # nothing broke, but the time limit was reached
    call: str = ""  # of the farthest rank
    phase: str = ""  # of the farthest rank
    seconds: float = 0.0  # the longest wait
    states: Sequence[Mapping[str, Any]] = ()  # the ranks by equal state, ready for JSON

    @property
    def facts(self) -> dict[str, Any]:
        """Everything but the text, ready for JSON."""
        names = ("head", "missing", "is_late", "reporters", "call", "phase", "seconds", "states")
        return {name: getattr(self, name) for name in names}

    @property
    def filed(self) -> str:
        """The text for the report file: the report for a reader, then a line of JSON with its other facts."""
        return f"{self.text}\n\n{json.dumps(self.facts)}"


class WarningPolicy:
    def __init__(self, rank: int, file: ReportFile, warn_after_seconds: float) -> None:
        self._rank = rank
        self._logger = logger_of(rank)
        self._file = file
        self._warn_after_seconds = warn_after_seconds
        self._next_seconds = warn_after_seconds
        self._is_checking = self._is_early = False
        self._stall_began = float("-inf")
        self._stall_in_full = ""  # the summary of the last wait that was logged in full
        self._stall_due = 0.0  # the seconds after which the same wait is told again
        self._last: Report | None = None  # of this call
        self.last_in_full: Report | None = None  # the last report of this call that was logged in full

    def begin(self, *, is_early: bool) -> None:
        """Start a call. ``is_early``: one of the first, of which the first warning is a line."""
        self._next_seconds = self._warn_after_seconds
        self._is_early = is_early
        self._last = self.last_in_full = None

    def is_due(self, waited_seconds: float) -> bool:
        """Whether to check the other ranks now. After True, :meth:`end_check` must follow."""
        if waited_seconds < self._next_seconds or self._is_checking:
            return False
        self._next_seconds = 2 * waited_seconds
        self._is_checking = True
        return True

    def end_check(self) -> None:
        self._is_checking = False

    def warn(self, report: Report) -> None:
        """Log a report in full and write it to the file, if it is new and a rank makes no progress; else log a line."""
        # A computing rank may be in an endless loop: a line for its first report in each place, later the full report.
        is_new_work = report.is_busy and not _is_same(report, self._last)
        if report.is_progressing or is_new_work:
            self._log(f"{report.head}, alive{'' if report.is_progressing else ' and busy'}", report)
        elif self._is_early and self._last is None:
            self._log(f"{report.head}, in one of the first calls", report)
        elif _is_same(report, self.last_in_full):
            self._log(f"{report.head}, as reported", report)
        else:
            self.tell_in_full(report)
            self.last_in_full = report
        self._last = report

    def warn_of_stall(self, report: Report) -> None:
        """Log a report on a wait outside of calls: in full, a line at twice the time each, nothing in between. A later
        wait at the same places is a line, too, and in full in the file alone.

        A rank that computes or is in a debugger is one line, once: it may evaluate the model alone, by design.
        """
        began = time.monotonic() - report.seconds
        if abs(began - self._stall_began) > max(self._warn_after_seconds / 2, _DELAY_SECONDS):
            self._last = None  # another wait, and the end of the one before was not told
        self._stall_began = began
        last = self._last if _is_same(report, self._last) else None
        is_longer = last is not None and last.seconds <= report.seconds
        if is_longer and report.seconds < 0.9 * self._stall_due:
            return  # of another rank that waits, too
        self._last, self._stall_due = report, 2 * report.seconds
        if not report.is_busy and not is_longer and report.summary != self._stall_in_full:
            self.tell_in_full(report)
            self._stall_in_full = report.summary
        elif not report.is_busy:
            if not is_longer:
                self._file.append(report.filed)
            self._log(f"{report.head}, as reported", report)
        elif not is_longer:
            self._log(f"{report.head}", report)

    def end_stall(self) -> None:
        """The wait that was reported last has ended."""
        if self._last is not None:
            self._log("the wait outside of calls has ended", self._last, {"event": "arrived", "call": ""})
        self._last = None

    def tell_in_full(self, report: Report) -> bool:
        """Log a report in full and write it to the file; return whether this rank logs."""
        self._file.append(report.filed)
        return self._log(f"{report.text}\n({self._file.where(_REPORTS)})\n{how_to_explain(_SECTION)}", report)

    def tell_completion(self, call: str) -> None:
        """Log that a payload is complete, after this rank has logged a report on it."""
        text = "%s: the payload is complete now on rank %d"
        self._logger.warning(text, call, self._rank, extra={"event": "arrived", "call": call, "phase": "payload"})

    def end(self, call: str) -> None:
        """Log that the call has succeeded, if a report on it was logged in full."""
        if self.last_in_full is not None:
            text = f"{call}: all ranks have arrived, and the call has succeeded"
            self._log(text, self.last_in_full, {"event": "arrived", "call": call})

    def notify_loss(self, text: str, report: Report) -> None:
        # At once: a launcher may end this process before any exception is raised.
        self._logger.warning("%s (%s)", text, self._file.where(_REPORTS), extra=_fields("lost", report))

    def save(self, report: Report, introduction: str = "") -> None:
        """Write a report to the file; to the log if the file cannot be written."""
        if not self._file.append(introduction + report.filed):
            where = self._file.where(_REPORTS)
            self._logger.warning("%s%s\n(%s)", introduction, report.text, where, extra=_fields("lost", report))

    def _log(self, text: str, report: Report, fields: Mapping[str, Any] | None = None) -> bool:
        """Log if this rank is the reporter of its host; return whether it is."""
        if self._rank in report.reporters:
            self._logger.warning("%s", text, extra=fields or _fields("waiting", report))
        return self._rank in report.reporters


def _fields(event: str, report: Report) -> dict[str, Any]:
    ranks = list(report.missing)
    place = {"call": report.call, "phase": report.phase or None, "seconds": report.seconds}
    return {"event": event, **place, "ranks": ranks, "report": report.facts}


def _is_same(report: Report, other: Report | None) -> bool:
    return other is not None and report.summary == other.summary
