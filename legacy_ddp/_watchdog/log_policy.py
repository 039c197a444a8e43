"""What does the log hear of a rank's long wait: when, in how many words, and not twice?"""

from legacy_ddp._log import logger_of
from legacy_ddp._watchdog.report import Report
from legacy_ddp._watchdog.report_file import ReportFile

_REPORTS = "reports of this rank:"


class Voice:
    """One per watchdog, for one call after the other."""

    def __init__(self, rank: int, file: ReportFile, warn_after_seconds: float) -> None:
        self._rank = rank
        self._logger = logger_of(rank)
        self._file = file
        self._warn_after_seconds = warn_after_seconds
        self._next_seconds = warn_after_seconds
        self._is_looking = False
        self._said: Report | None = None  # in this call
        self._reported: Report | None = None  # likewise, in full

    def begin(self, *, warns: bool) -> None:
        """A call begins. ``warns``: whether long waiting in it is worth a word."""
        self._next_seconds = self._warn_after_seconds if warns else float("inf")
        self._said = self._reported = None

    def is_due(self, waited_seconds: float) -> bool:
        """Whether to look after the others now, and :meth:`look_away` at the end; again after twice the time."""
        if waited_seconds < self._next_seconds or self._is_looking:
            return False
        self._next_seconds = 2 * waited_seconds
        self._is_looking = True
        return True

    def look_away(self) -> None:
        """The look is over, whatever came of it."""
        self._is_looking = False

    def say(self, report: Report) -> None:
        """What is known now: in full and to the file what is new and bad, in a line what is not."""
        # What computes may be in a loop: it is believed once at each place.
        is_believed = report.is_busy and not _is_same(report, self._said)
        if report.is_harmless or is_believed:
            self._log(f"{report.head}, alive{'' if report.is_harmless else ' and busy'}", report)
        elif _is_same(report, self._reported):
            self._log(f"{report.head}, as reported", report)
        else:
            self._file.append(report.text)
            self._log(f"{report.text}\n({self._file.where(_REPORTS)})", report)
            self._reported = report
        self._said = report

    def end(self, call: str) -> None:
        """The call has succeeded: whoever read a report is told."""
        if self._reported is not None:
            self._log(f"{call}: all ranks are there now, and it is done", self._reported)

    def tell_of_loss(self, text: str) -> None:
        """A launcher may end this process before anything is raised: then this is all that its user sees."""
        self._logger.warning("%s\n(%s)", text, self._file.where(_REPORTS))

    def file(self, text: str) -> None:
        """Put a report into the file; into the log where it cannot be put there."""
        if not self._file.append(text):
            self._logger.warning("%s\n(%s)", text, self._file.where(_REPORTS))

    def _log(self, text: str, report: Report) -> None:
        """On one rank of each machine."""
        if self._rank in report.speakers:
            self._logger.warning("%s", text)


def _is_same(report: Report, other: Report | None) -> bool:
    return other is not None and report.summary == other.summary
