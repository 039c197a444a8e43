"""The watchdog of a rank: follows its calls, answers requests, fetches reports and propagates failures."""

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache

from legacy_ddp._compare import name_ranks
from legacy_ddp._error_text import error_line
from legacy_ddp._watchdog.background import BackgroundTasks
from legacy_ddp._watchdog.client import (
    MAX_CONCURRENT_REQUESTS,
    Endpoint,
    Message,
    Outcome,
    decode_endpoint,
    request,
    request_all,
)
from legacy_ddp._watchdog.failure import Failure, decode_failure
from legacy_ddp._watchdog.log_policy import WarningPolicy
from legacy_ddp._watchdog.propagation import FailureRecord, broadcast_failure
from legacy_ddp._watchdog.report import Report, compose, decode_report
from legacy_ddp._watchdog.report_file import ReportFile
from legacy_ddp._watchdog.rows import Row
from legacy_ddp._watchdog.server import StatusServer
from legacy_ddp._watchdog.status import RankStatus, build_rows, own_status, poll_ranks

# How long to wait for the rank that composes the report; it polls twice, and silent ranks delay it.
_REPORT_SECONDS = 3.0
# Pause between two requests for a report: a thousand ranks must not keep the composing rank from its work.
_RETRY_SECONDS, _RETRY_SECONDS_PER_RANK = 0.05, 0.0005
# Ranks that start to wait together request a report within this time of each other, and must get the same text.
_FRESH_SECONDS = 2.0

_alive: "weakref.WeakSet[Watchdog]" = weakref.WeakSet()


@dataclass
class _SharedReport:
    """A report of this rank for all ranks that request it; None until composed."""

    report: Report | None = None
    composed_at: float = float("inf")


class Watchdog:
    """The watchdog of one rank on one process group.

    Raises:
        OSError: no report file can be made in ``report_dir``, no socket can be made, or no thread can be started.
    """

    def __init__(
        self, rank: int, size: int, *, warn_after_seconds: float, report_dir: str | os.PathLike[str] | None
    ) -> None:
        self.rank = rank
        self.warn_after_seconds = warn_after_seconds
        self.file = ReportFile(report_dir, rank, size)
        with ExitStack() as opened:
            opened.callback(self.file.close)
            self._background = BackgroundTasks(rank)
            opened.callback(self._background.close)
            self._server = StatusServer(rank, self._answer, self._on_closed)
            opened.pop_all()
        self._peers: list[Endpoint | None] = [None] * size
        self._status = RankStatus()
        self._fresh_seconds = min(_FRESH_SECONDS, warn_after_seconds / 2)
        self._policy = WarningPolicy(rank, self.file, warn_after_seconds)
        self._record = FailureRecord(rank, self._policy, self._local_rows)
        self._warnings: dict[int, _SharedReport] = {}  # by serial
        self._final: _SharedReport | None = None
        self._lock = threading.Lock()  # of the shared reports
        _alive.add(self)
        _register_after_fork()

    def endpoint(self) -> bytes:
        """The endpoint of this rank, encoded for :meth:`start` on every rank."""
        return self._server.endpoint.encode()

    def start(self, endpoints: Sequence[bytes]) -> None:
        """Take the endpoints of all ranks, in the order of the ranks, and begin to answer."""
        self._peers = [decode_endpoint(rank, data) for rank, data in enumerate(endpoints)]
        self._status.serial = 1  # every rank is in its first call; some ranks may have failed in a call before
        self._server.start(self._peers[(self.rank + 1) % len(self._peers)])

    def begin(self, call: str, *, warns: bool) -> None:
        """This rank enters a call. ``warns``: whether a long wait in the call is worth a warning."""
        status = self._status
        status.activity.enter("plan", call)
        status.serial, status.call, status.in_call = status.serial + 1, call, True
        self._policy.begin(warns=warns)

    def enter(self, phase: str, call: str) -> None:
        """This rank enters the next phase of the call."""
        self._status.activity.enter(phase, call)

    def end(self, *, has_met: bool, succeeded: bool) -> None:
        """This rank leaves the call. ``has_met``: communication has begun, so the other ranks count the call, too."""
        self._status.in_call = False
        if not has_met:
            self._status.serial -= 1
        if succeeded:
            self._policy.end(self._status.call)

    def check_peers(self, waited_seconds: float) -> Failure | None:
        """To be called repeatedly during a wait: warn if a warning is due, and return a failure found by any rank."""
        if self._policy.is_due(waited_seconds):
            self._background.submit(self._warn, self._status.serial)
        return self._record.due_failure

    def finalize(self, failure: Failure) -> Report:
        """The final report, equal on all ranks that fetch it. On return on disk, and sent to the other ranks."""
        # Before any request: this process may be ended at any moment.
        self._record.record_failure(failure, logs=not failure.is_late)
        if self._record.final_report is not None:
            return self._record.final_report
        return self._record.finalize(self._fetch_report(self._status.serial, self._record.failure))

    def notify_failure(self, error: BaseException) -> None:
        """Notify the other ranks that this rank left a call in which they wait; this process may live on."""
        failure = Failure(
            f"{name_ranks([self.rank])} left {self._status.call} with {error_line(error)}", ranks=(self.rank,)
        )
        self._record.record_failure(failure)
        self._broadcast(failure, None, range(len(self._peers)))

    def close(self) -> None:
        """Stop, after sending the exit reason to the neighbours."""
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        how = f"with {error_line(error)}" if error else "normally; did it run out of data?"
        self._server.close(self._record.exit_reason() or f"left after {self._status.call} {how}")
        self._background.close()
        self.file.close()

    def after_fork(self) -> None:
        """In a forked child: release sockets and files of the parent."""
        self._server.after_fork()
        self.file.after_fork()

    def _answer(self, message: Message) -> Message:
        if message["request"] == "status":
            return own_status(self._status, self._peers)
        failure = decode_failure(message["failure"])
        if message["request"] == "report":
            return self._report_for(int(message["serial"]), failure)
        if failure is not None:
            self._record.record_failure(failure)
        if message["report"]:
            self._record.finalize(decode_report(message["report"]))
        return {}

    def _report_for(self, serial: int, failure: Failure | None) -> Message:
        """The answer to a request for a report; empty until composed. The final report answers every later request."""
        with self._lock:
            shared = self._final
            if shared is None and failure is not None:
                shared = self._final = self._start_report(failure)
            elif shared is None:
                shared = self._warnings.get(serial)
                if shared is None or time.monotonic() - shared.composed_at > self._fresh_seconds:
                    shared = self._start_report(None)
                    # Ranks may be in two calls at a time, not more.
                    recent = {other: old for other, old in self._warnings.items() if abs(other - serial) <= 1}
                    self._warnings = {**recent, serial: shared}
        return asdict(shared.report) if shared.report else {}

    def _start_report(self, failure: Failure | None) -> _SharedReport:
        shared = _SharedReport()
        self._background.submit(self._make_report, shared, failure)
        return shared

    def _make_report(self, shared: _SharedReport, failure: Failure | None) -> None:
        rows = poll_ranks(self._peers, self._server.endpoint, twice=failure is None)
        report = compose(rows, failure)
        if failure is not None:
            report = self._record.finalize(report)
            # Before any rank fetches the report: a rank with the report leaves, and would then look missing.
            answering = {row.rank for row in rows if row.outcome is Outcome.ANSWERED}
            self._broadcast(failure, report, answering)
            # A silent rank may get the report when it runs again; no rank waits for this.
            self._background.submit(self._broadcast, failure, report, set(range(len(rows))) - answering)
        shared.report, shared.composed_at = report, time.monotonic()

    def _fetch_report(self, serial: int, failure: Failure | None) -> Report:
        """The report of the lowest rank that answers, equal on all ranks; a local report if no rank answers."""
        deadline = time.monotonic() + _REPORT_SECONDS
        message = {"request": "report", "serial": serial, "failure": failure and asdict(failure)}
        for peer in self._answering(deadline):
            while time.monotonic() < deadline:
                outcome, answer = request(peer, message, self._server.endpoint.identity)
                if outcome is not Outcome.ANSWERED:
                    break
                if answer:
                    return decode_report(answer)
                self._background.sleep_and_run_pending(_RETRY_SECONDS + _RETRY_SECONDS_PER_RANK * len(self._peers))
        return compose(self._local_rows(failure), failure, was_polled=False)

    def _answering(self, deadline: float) -> Iterator[Endpoint]:
        """The lowest rank, then the other ranks that answer, in order.

        Many ranks are asked at once: a few silent ranks, one after the other, would use up the time.
        """
        known = [peer for peer in self._peers if peer is not None]
        yield from known[:1]
        for start in range(1, len(known), MAX_CONCURRENT_REQUESTS):
            if time.monotonic() > deadline:
                return
            some = known[start : start + MAX_CONCURRENT_REQUESTS]
            ping = {"request": "record", "failure": None, "report": None}
            answers = request_all(some, ping, self._server.endpoint.identity)
            yield from (peer for peer in some if answers[peer.rank][0] is Outcome.ANSWERED)

    def _local_rows(self, failure: Failure | None) -> list[Row]:
        """The rows that this rank knows without a poll."""
        answers = {self.rank: (Outcome.ANSWERED, own_status(self._status, self._peers))}
        lost = dict.fromkeys(failure.ranks if failure else (), (Outcome.ENDED, None))
        return build_rows(self._peers, {**lost, **answers})

    def _warn(self, serial: int) -> None:
        try:
            report = self._fetch_report(serial, None)
            if serial == self._status.serial and self._status.in_call:  # otherwise the wait is over
                self._policy.warn(report)
        finally:
            self._policy.end_check()

    def _on_closed(self, rank: int, exit_reason: str | None) -> None:
        """A monitor connection was closed."""
        if exit_reason is None:
            self._background.submit(self._check_neighbour, rank)
        else:
            self._status.exit_reasons[rank] = exit_reason

    def _check_neighbour(self, rank: int) -> None:
        """Report a neighbour whose process has ended. If its host vanished, only the timeout shows the loss."""
        peer = self._peers[rank]
        own = self._server.endpoint.identity
        if peer is not None and request(peer, {"request": "status"}, own)[0] is Outcome.ENDED:
            failure = Failure(f"{name_ranks([rank])} ended unexpectedly", ranks=(rank,))
            self._record.record_failure(failure, logs=True)
            self._broadcast(failure, None, range(len(self._peers)))

    def _broadcast(self, failure: Failure, report: Report | None, ranks: Iterable[int]) -> None:
        others = [peer for rank in ranks if rank != self.rank and (peer := self._peers[rank]) is not None]
        broadcast_failure(failure, report, others, self._server.endpoint.identity)


@cache
def _register_after_fork() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for watchdog in list(_alive):
        watchdog.after_fork()
