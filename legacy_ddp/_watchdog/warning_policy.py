"""When a report on a waiting or failed call goes to the log or to the file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from legacy_ddp._log import logger_of
from legacy_ddp._text import how_to_explain
from legacy_ddp._watchdog.report_file import ReportFile

_REPORTS = "reports of this rank:"
_SECTION = "Ranks have waited"


@dataclass(frozen=True)
class Report:
    """A text for all ranks, and the missing ranks.

    ``head``: the first lines of ``text``, unwrapped. ``summary``: the missing ranks and their activity; equal in two
    reports if nothing has changed. ``is_progressing``: all missing ranks make progress. ``is_busy``: all missing ranks
    make progress or compute, perhaps in a loop. ``reporters``: a rank of each host, to show the report there, if
    possible a waiting rank. ``is_late``: nothing broke, the time limit was reached. ``call`` and ``phase``: where the
    farthest rank is. ``seconds``: the longest wait. ``states``: the ranks by equal state, with what was heard of them,
    ready for JSON.
    """

    head: str
    text: str
    summary: str
    missing: tuple[int, ...]
    reporters: tuple[int, ...]
    is_progressing: bool = False
    is_busy: bool = False
    is_late: bool = False
    call: str = ""
    phase: str = ""
    seconds: float = 0.0
    states: Sequence[Mapping[str, Any]] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """Everything but the text, ready for JSON."""
        names = ("head", "missing", "is_late", "reporters", "call", "phase", "seconds", "states")
        return {name: getattr(self, name) for name in names}

    @property
    def filed(self) -> str:
        """The text for the report file: the text for a reader, and everything in a line of JSON."""
        return f"{self.text}\n\n{json.dumps(self.facts)}"


class WarningPolicy:
    def __init__(self, rank: int, file: ReportFile, warn_after_seconds: float) -> None:
        self._rank = rank
        self._logger = logger_of(rank)
        self._file = file
        self._warn_after_seconds = warn_after_seconds
        self._next_seconds = warn_after_seconds
        self._is_checking = False
        self._last: Report | None = None  # of this call
        self.last_in_full: Report | None = None  # the last report of this call that was logged in full

    def begin(self, *, warns: bool) -> None:
        """Start a call. ``warns``: whether a long wait in this call is worth a warning."""
        self._next_seconds = self._warn_after_seconds if warns else float("inf")
        self._last = self.last_in_full = None

    def is_due(self, waited_seconds: float) -> bool:
        """Whether to check the other ranks now. If True, end with :meth:`end_check`; due again after twice the time."""
        if waited_seconds < self._next_seconds or self._is_checking:
            return False
        self._next_seconds = 2 * waited_seconds
        self._is_checking = True
        return True

    def end_check(self) -> None:
        self._is_checking = False

    def warn(self, report: Report) -> None:
        """Log a report in full and write the file, if the report is new and bad; else log a line."""
        # A computing rank may be in an endless loop: one line the first time in each place, the full report afterwards.
        is_new_work = report.is_busy and not _is_same(report, self._last)
        if report.is_progressing or is_new_work:
            self._log(f"{report.head}, alive{'' if report.is_progressing else ' and busy'}", report)
        elif _is_same(report, self.last_in_full):
            self._log(f"{report.head}, as reported", report)
        else:
            self.tell_in_full(report)
            self.last_in_full = report
        self._last = report

    def tell_in_full(self, report: Report) -> bool:
        """Log a report in full and write the file; return whether this rank is the one that logs."""
        self._file.append(report.filed)
        return self._log(f"{report.text}\n({self._file.where(_REPORTS)})\n{how_to_explain(_SECTION)}", report)

    def tell_completion(self, call: str) -> None:
        """Log that a payload, of which this rank has logged a report, is complete."""
        text = "%s: the payload is complete now on rank %d"
        self._logger.warning(text, call, self._rank, extra={"event": "arrived", "call": call, "phase": "payload"})

    def end(self, call: str) -> None:
        """The call has succeeded after a report in full: log this."""
        if self.last_in_full is not None:
            text = f"{call}: all ranks have arrived, and the call has succeeded"
            self._log(text, self.last_in_full, {"event": "arrived", "call": call})

    def notify_loss(self, text: str, report: Report) -> None:
        """Log a loss at once: a launcher may end this process before any exception is raised."""
        self._logger.warning("%s (%s)", text, self._file.where(_REPORTS), extra=_fields("lost", report))

    def save(self, report: Report, introduction: str = "") -> None:
        """Write a report to the file; to the log if the file cannot be written."""
        if not self._file.append(introduction + report.filed):
            where = self._file.where(_REPORTS)
            self._logger.warning("%s%s\n(%s)", introduction, report.text, where, extra=_fields("lost", report))

    def _log(self, text: str, report: Report, fields: Mapping[str, Any] | None = None) -> bool:
        """Write the text to the log if this rank is the reporter of its host; return whether it is."""
        if self._rank in report.reporters:
            self._logger.warning("%s", text, extra=fields or _fields("waiting", report))
        return self._rank in report.reporters


def _fields(event: str, report: Report) -> dict[str, Any]:
    ranks = list(report.missing)
    place = {"call": report.call, "phase": report.phase or None, "seconds": report.seconds}
    return {"event": event, **place, "ranks": ranks, "report": report.facts}


def _is_same(report: Report, other: Report | None) -> bool:
    return other is not None and report.summary == other.summary
