"""Exchange of reports: one rank composes a report, the other ranks fetch the report."""

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from legacy_ddp._watchdog.background import BackgroundTasks
from legacy_ddp._watchdog.client import MAX_CONCURRENT_REQUESTS, Endpoint, Message, Outcome, request, request_all
from legacy_ddp._watchdog.failure import Failure
from legacy_ddp._watchdog.propagation import FailureRecord, broadcast_failure
from legacy_ddp._watchdog.report import Report, compose, decode_report
from legacy_ddp._watchdog.status import GroupView, poll_ranks

# How long to wait for the rank that composes the report; it polls twice, and silent ranks delay it.
_REPORT_SECONDS = 3.0
# Pause between two requests for a report: a thousand ranks must not keep the composing rank from its work.
_RETRY_SECONDS, _RETRY_SECONDS_PER_RANK = 0.05, 0.0005
# Ranks that start to wait together request a report within this time of each other, and must get the same text.
_FRESH_SECONDS = 2.0


@dataclass
class _SharedReport:
    """A report for all ranks; ``report`` is None until composed."""

    report: Report | None = None
    composed_at: float = float("inf")


class ReportExchange:
    """The reports of one rank: composed here for other ranks, or fetched from the lowest rank that answers."""

    def __init__(
        self, view: GroupView, record: FailureRecord, background: BackgroundTasks, warn_after_seconds: float
    ) -> None:
        self._view = view
        self._record = record
        self._background = background
        self._fresh_seconds = min(_FRESH_SECONDS, warn_after_seconds / 2)
        self._by_serial: dict[int, _SharedReport] = {}  # reports on waits, without a failure
        self._final: _SharedReport | None = None
        self._lock = threading.Lock()

    def answer(self, serial: int, failure: Failure | None) -> Message:
        """The answer to a request for a report; empty until composed.

        The first request starts the composition. The final report answers every later request.
        """
        with self._lock:
            shared = self._final
            if shared is None and failure is not None:
                shared = self._final = self._start_report(failure)
            elif shared is None:
                shared = self._by_serial.get(serial)
                if shared is None or time.monotonic() - shared.composed_at > self._fresh_seconds:
                    shared = self._start_report(None)
                    # Ranks may be in two calls at a time, not more.
                    recent = {other: old for other, old in self._by_serial.items() if abs(other - serial) <= 1}
                    self._by_serial = {**recent, serial: shared}
        return asdict(shared.report) if shared.report else {}

    def fetch(self, serial: int, failure: Failure | None) -> Report:
        """The report of the lowest answering rank, equal on all ranks; a local report if no rank answers."""
        deadline = time.monotonic() + _REPORT_SECONDS
        message = {"request": "report", "serial": serial, "failure": failure and asdict(failure)}
        for peer in self._answering(deadline):
            while time.monotonic() < deadline:
                outcome, answer = request(peer, message, self._view.own.identity)
                if outcome is not Outcome.ANSWERED:
                    break
                if answer:
                    return decode_report(answer)
                self._background.sleep_and_run_pending(_RETRY_SECONDS + _RETRY_SECONDS_PER_RANK * len(self._view.peers))
        return compose(self._view.local_rows(failure), failure, was_polled=False)

    def _start_report(self, failure: Failure | None) -> _SharedReport:
        shared = _SharedReport()
        self._background.submit(self._make_report, shared, failure)
        return shared

    def _make_report(self, shared: _SharedReport, failure: Failure | None) -> None:
        rows = poll_ranks(self._view.peers, self._view.own, twice=failure is None)
        report = compose(rows, failure)
        if failure is not None:
            report = self._record.finalize(report)
            # Before any rank fetches the report: a rank with the report leaves, and would then look missing.
            answering = {row.rank for row in rows if row.outcome is Outcome.ANSWERED}
            broadcast_failure(self._view, failure, report, answering)
            # A silent rank may get the report when it runs again; no rank waits for this.
            self._background.submit(broadcast_failure, self._view, failure, report, set(range(len(rows))) - answering)
        shared.report, shared.composed_at = report, time.monotonic()

    def _answering(self, deadline: float) -> Iterator[Endpoint]:
        """The lowest rank, then the other answering ranks, in order.

        Many requests at the same time: a few silent ranks, asked one by one, would use up the time.
        """
        known = [peer for peer in self._view.peers if peer is not None]
        yield from known[:1]
        for start in range(1, len(known), MAX_CONCURRENT_REQUESTS):
            if time.monotonic() > deadline:
                return
            some = known[start : start + MAX_CONCURRENT_REQUESTS]
            ping = {"request": "record", "failure": None, "report": None}
            answers = request_all(some, ping, self._view.own.identity)
            yield from (peer for peer in some if answers[peer.rank][0] is Outcome.ANSWERED)
