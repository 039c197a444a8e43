"""Propagation of a failure: the record on this rank, the final report, and the broadcast to the other ranks."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from legacy_ddp._watchdog.client import Endpoint, request_all
from legacy_ddp._watchdog.failure import Failure
from legacy_ddp._watchdog.log_policy import WarningPolicy
from legacy_ddp._watchdog.processes import Identity
from legacy_ddp._watchdog.report import Report, compose, format_loss
from legacy_ddp._watchdog.rows import LEFT_AFTER_LOSS, Row

# A collective may still complete if a rank ends after its own part of the collective.
_GRACE_SECONDS = 0.5


class FailureRecord:
    """The first failure on one rank, and the final report on this failure. Any thread may call any method.

    ``local_rows``: the rows that this rank knows without a poll.
    """

    def __init__(self, rank: int, policy: WarningPolicy, local_rows: Callable[[Failure], list[Row]]) -> None:
        self.failure: Failure | None = None
        self.final_report: Report | None = None
        self._rank = rank
        self._policy = policy
        self._local_rows = local_rows
        self._recorded_at = 0.0
        self._missing: tuple[int, ...] = ()  # named by the report that was saved with the failure
        self._lock = threading.Lock()

    @property
    def due_failure(self) -> Failure | None:
        """The failure, half a second after it was recorded."""
        return self.failure if time.monotonic() - self._recorded_at > _GRACE_SECONDS else None

    def record_failure(self, failure: Failure, *, logs: bool = False) -> None:
        """Save the first failure with the known rows. ``logs``: found on this rank, so log it, too.

        A failure found on this rank is also saved if the first failure named no rank: gloo may notice a loss before the
        kernel shows the end of the process.
        """
        with self._lock:
            if self.failure is not None and (self._missing or not logs):
                return
            if self.failure is None:
                self.failure, self._recorded_at = failure, time.monotonic()
            rows = self._local_rows(failure)
            report = compose(rows, failure, was_polled=False)
            self._missing = report.missing
        self._policy.save(f"from this rank alone, before any other rank was asked:\n{report.text}")
        if logs:
            missing = "" if failure.ranks else report.summary
            self._policy.notify_loss(format_loss(rows[self._rank], failure.reason, missing))

    def finalize(self, report: Report) -> Report:
        """The final report: ``report``, unless there was one before. On disk on return."""
        with self._lock:
            if self.final_report is None:
                self._policy.save(report.text)
                self.final_report = report
            return self.final_report

    def exit_reason(self) -> str:
        """The exit reason of this rank after a failure, for a rank that missed the report because it was stopped."""
        if self.failure is None:
            return ""
        if self._rank in self.failure.ranks:
            return self.failure.reason
        return f"{LEFT_AFTER_LOSS}: {self.final_report.summary}" if self.final_report else LEFT_AFTER_LOSS


def broadcast_failure(failure: Failure, report: Report | None, peers: Sequence[Endpoint], own: Identity) -> None:
    """Send a failure to ``peers``, with the final report if there is one."""
    request_all(peers, {"request": "record", "failure": asdict(failure), "report": report and asdict(report)}, own)
