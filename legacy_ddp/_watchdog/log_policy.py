"""Policy for warnings about long waits: when to warn, in the log or the file, in full or in one line."""

from legacy_ddp._log import logger_of
from legacy_ddp._watchdog.report import Report
from legacy_ddp._watchdog.report_file import ReportFile

_REPORTS = "reports of this rank:"


class WarningPolicy:
    """The warnings of a watchdog, call after call."""

    def __init__(self, rank: int, file: ReportFile, warn_after_seconds: float) -> None:
        self._rank = rank
        self._logger = logger_of(rank)
        self._file = file
        self._warn_after_seconds = warn_after_seconds
        self._next_seconds = warn_after_seconds
        self._is_checking = False
        self._last: Report | None = None  # of this call
        self._last_in_full: Report | None = None  # of this call

    def begin(self, *, warns: bool) -> None:
        """Start a call. ``warns``: whether a long wait in this call is worth a warning."""
        self._next_seconds = self._warn_after_seconds if warns else float("inf")
        self._last = self._last_in_full = None

    def is_due(self, waited_seconds: float) -> bool:
        """Whether to check the other ranks now. If True, end with :meth:`end_check`; due again after twice the time."""
        if waited_seconds < self._next_seconds or self._is_checking:
            return False
        self._next_seconds = 2 * waited_seconds
        self._is_checking = True
        return True

    def end_check(self) -> None:
        """End the check begun by :meth:`is_due`."""
        self._is_checking = False

    def warn(self, report: Report) -> None:
        """Log a report in full and write the file, if the report is new and bad; else log a line."""
        # A computing rank may be in an endless loop: one line the first time in each place, the full report afterwards.
        is_new_work = report.is_busy and not _is_same(report, self._last)
        if report.is_progressing or is_new_work:
            self._log(f"{report.head}, alive{'' if report.is_progressing else ' and busy'}", report)
        elif _is_same(report, self._last_in_full):
            self._log(f"{report.head}, as reported", report)
        else:
            self._file.append(report.text)
            self._log(f"{report.text}\n({self._file.where(_REPORTS)})", report)
            self._last_in_full = report
        self._last = report

    def end(self, call: str) -> None:
        """The call has succeeded: log this if a report was logged in full."""
        if self._last_in_full is not None:
            self._log(f"{call}: all ranks have arrived, and the call has succeeded", self._last_in_full)

    def notify_loss(self, text: str) -> None:
        """Log a loss at once: a launcher may end this process before any exception is raised."""
        self._logger.warning("%s\n(%s)", text, self._file.where(_REPORTS))

    def save(self, text: str) -> None:
        """Write a report to the file; to the log if the file cannot be written."""
        if not self._file.append(text):
            self._logger.warning("%s\n(%s)", text, self._file.where(_REPORTS))

    def _log(self, text: str, report: Report) -> None:
        """Log, on a single rank of each machine."""
        if self._rank in report.reporters:
            self._logger.warning("%s", text)


def _is_same(report: Report, other: Report | None) -> bool:
    return other is not None and report.summary == other.summary
