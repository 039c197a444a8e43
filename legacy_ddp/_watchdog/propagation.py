"""Propagation of a failure: the record on this rank, the final report, and the broadcast to the other ranks."""

import threading
import time
from collections.abc import Iterable
from dataclasses import asdict

from legacy_ddp._watchdog.client import request_all
from legacy_ddp._watchdog.failure import Failure
from legacy_ddp._watchdog.log_policy import WarningPolicy
from legacy_ddp._watchdog.missing_ranks import LEFT_AFTER_LOSS
from legacy_ddp._watchdog.report import Report, compose, format_loss
from legacy_ddp._watchdog.status import GroupView

# A collective may still complete if a rank ends after its own part of the collective.
_GRACE_SECONDS = 0.5


class FailureRecord:
    """The first failure on one rank, and the final report. Any thread may call any method."""

    def __init__(self, view: GroupView, policy: WarningPolicy) -> None:
        self.failure: Failure | None = None
        self.final_report: Report | None = None
        self._view = view
        self._policy = policy
        self._recorded_at = 0.0
        self._missing: tuple[int, ...] = ()  # named by the report that was saved with the failure
        self._lock = threading.Lock()

    @property
    def due_failure(self) -> Failure | None:
        """The failure, once the grace time is over."""
        return self.failure if time.monotonic() - self._recorded_at > _GRACE_SECONDS else None

    def record_failure(self, failure: Failure, *, logs: bool = False) -> None:
        """Record the first failure, and save a report from this rank alone.

        ``logs``: the failure was found on this rank, so log it, too. A later failure found on this rank is saved and
        logged if the first report named no rank: gloo may notice a loss before the kernel ends the process.
        """
        with self._lock:
            if self.failure is not None and (self._missing or not logs):
                return
            if self.failure is None:
                self.failure, self._recorded_at = failure, time.monotonic()
            rows = self._view.local_rows(failure)
            report = compose(rows, failure, was_polled=False)
            self._missing = report.missing
        self._policy.save(f"from this rank alone, before any other rank was asked:\n{report.text}")
        if logs:
            missing = "" if failure.ranks else report.summary
            self._policy.notify_loss(format_loss(rows[self._view.own.rank], failure.reason, missing))

    def finalize(self, report: Report) -> Report:
        """Save ``report`` as the final report, unless there is a final report; return the final report."""
        with self._lock:
            if self.final_report is None:
                self._policy.save(report.text)
                self.final_report = report
            return self.final_report

    def exit_reason(self) -> str:
        """The exit reason after a failure, else empty; for a stopped rank, which may miss the report."""
        if self.failure is None:
            return ""
        if self._view.own.rank in self.failure.ranks:
            return self.failure.reason
        return f"{LEFT_AFTER_LOSS}: {self.final_report.summary}" if self.final_report else LEFT_AFTER_LOSS


def broadcast_failure(
    view: GroupView, failure: Failure, report: Report | None = None, ranks: Iterable[int] | None = None
) -> None:
    """Send a failure, and the final report if there is one, to the other ranks, or to ``ranks`` only."""
    message = {"request": "record", "failure": asdict(failure), "report": report and asdict(report)}
    request_all(view.others(range(len(view.peers)) if ranks is None else ranks), message, view.own.identity)
