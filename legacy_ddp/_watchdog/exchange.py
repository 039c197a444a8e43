"""The reports that ranks exchange: on a wait or a failure, on a wait outside of calls, and for ``legacy-ddp watch``.

One rank composes the report on a wait or a failure, and the other ranks fetch it.
"""

import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from legacy_ddp._explainer import explainer
from legacy_ddp._text import name_ranks
from legacy_ddp._watchdog.client import (
    ANSWER_SECONDS,
    MAX_CONCURRENT_REQUESTS,
    PATIENT_SECONDS,
    Endpoint,
    Failure,
    Message,
    Outcome,
    encode_message,
    read_as,
    request,
    request_all,
)
from legacy_ddp._watchdog.ending import has_shown_error
from legacy_ddp._watchdog.local import FORMAT
from legacy_ddp._watchdog.process import Identity
from legacy_ddp._watchdog.reports import Report, ReportFile, WarningPolicy
from legacy_ddp._watchdog.server import BackgroundTasks
from legacy_ddp._watchdog.stall import LOOKS, StallWatch
from legacy_ddp._watchdog.status import (
    LEFT_AFTER_LOSS,
    GroupView,
    Row,
)

# A collective may still complete if a rank ends after its own part of the collective.
_GRACE_SECONDS = 0.5
# Pause between two requests for a report: a thousand ranks must not keep the composing rank from its work.
RETRY_SECONDS, _RETRY_SECONDS_PER_RANK = 0.05, 0.0005
# Ranks that start to wait together request a report within this time of each other, and must get the same text.
_FRESH_SECONDS = 2.0
_MAX_LOCAL_ANSWERS = 16  # at a time


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
        """The failure after the grace time; None before, and without a failure."""
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
            report = explainer().waiting(rows, failure, was_polled=False)
            self._missing = report.missing
        self._policy.save(report, "from this rank alone, before any other rank was asked:\n")
        if logs and not has_shown_error():  # else this process ends, and note_end() of the watchdog tells it
            # Before a poll a rank of another host may be the missing one: the reason alone may say more.
            missing = report.summary if report.missing and not failure.ranks else ""
            self._policy.notify_loss(explainer().loss(rows[self._view.own.rank], failure.reason, missing), report)

    def finalize(self, report: Report) -> Report:
        """Save ``report`` as the final report unless there is one; return the final report."""
        with self._lock:
            if self.final_report is None:
                self._policy.save(report)
                self.final_report = report
            return self.final_report

    def exit_reason(self) -> str:
        """Why this rank ends after a failure: a text that begins with a verb. Empty without a failure."""
        if self.failure is None:
            return ""
        own = self._view.own.rank
        if own in self.failure.ranks:
            return self.failure.reason.removeprefix(f"{name_ranks([own])} ")
        # Without a report: this rank was stopped, for example, and missed it.
        return f"{LEFT_AFTER_LOSS}: {self.final_report.summary}" if self.final_report else LEFT_AFTER_LOSS


def broadcast_failure(
    view: GroupView, failure: Failure, report: Report | None = None, ranks: Iterable[int] | None = None
) -> None:
    """Send a failure, and the final report if there is one, to ``ranks``; by default to all other ranks."""
    message = {"request": "record", "failure": asdict(failure), "report": report and asdict(report)}
    request_all(view.others(range(len(view.peers)) if ranks is None else ranks), message, view.own.identity)


def _report_seconds(size: int) -> float:
    """How long to wait for the report of a group of ``size`` ranks."""
    rounds = -(-size // MAX_CONCURRENT_REQUESTS)
    # If the lowest rank is silent, all others are asked whether they answer, and one of them polls all ranks twice.
    return PATIENT_SECONDS * (1 + 3 * rounds)


class _TimeLimit:
    """For the report of a group of ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.begin_anew()

    def begin_anew(self) -> None:
        self._end = time.monotonic() + _report_seconds(self._size)

    def is_over(self) -> bool:
        return time.monotonic() > self._end


def _compose(rows: Sequence[Row], failure: Failure | None, serial: int, payload_of: str, *, was_polled: bool) -> Report:
    if payload_of:
        return explainer().payload(rows, payload_of, serial)
    return explainer().waiting(rows, failure, was_polled=was_polled)


@dataclass
class _SharedReport:
    """A report that this rank composes for all ranks."""

    report: Report | None = None  # None until it is composed
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
        # Reports without a failure: on the wait in a call ("") or on the payload of a call, by number of the call.
        self._by_serial: dict[tuple[int, str], _SharedReport] = {}
        self._final: _SharedReport | None = None
        self._lock = threading.Lock()

    def answer(self, serial: int, failure: Failure | None, *, payload_of: str = "") -> Message:
        """The answer to a request for a report; empty until the report is composed.

        The first request starts the composition.
        ``payload_of``: a call, for the report on its payload; by default the report is on the wait in call ``serial``.
        """
        with self._lock:
            shared = None if payload_of else self._final  # the final report answers all later requests on a call
            if shared is None and failure is not None:
                shared = self._final = self._start_report(failure)
            elif shared is None:
                shared = self._by_serial.get((serial, payload_of))
                if shared is None or time.monotonic() - shared.composed_at > self._fresh_seconds:
                    shared = self._start_report(None, serial, payload_of)
                    # At one time ranks may be in two calls, not more.
                    recent = {
                        other: old
                        for other, old in self._by_serial.items()
                        if abs(other[0] - serial) <= 1 or bool(other[1]) != bool(payload_of)
                    }
                    self._by_serial = {**recent, (serial, payload_of): shared}
        return asdict(shared.report) if shared.report else {}

    def fetch(self, serial: int, failure: Failure | None, *, payload_of: str = "") -> Report:
        """The report of the lowest answering rank, equal on all ranks; a local report if no rank answers.

        ``payload_of``: as for :meth:`answer`. The time begins anew when a rank answers that it composes the report: on
        a crowded machine the search for this rank may use up the time, or a rank that composed it, and ended.
        """
        limit = _TimeLimit(len(self._view.peers))
        message = {
            "request": "report",
            "serial": serial,
            "failure": failure and asdict(failure),
            "payload_of": payload_of,
        }
        for peer in self._answering(limit):
            is_composed = False
            while not limit.is_over():
                outcome, answer = request(peer, message, self._view.own.identity)
                if self._record.final_report is not None and failure is not None:
                    return self._record.final_report  # of another rank, which arrived meanwhile
                if outcome is not Outcome.ANSWERED:
                    break
                if answer:
                    return read_as(Report, answer)
                if not is_composed:
                    is_composed = True
                    limit.begin_anew()
                self._background.sleep_and_run_pending(RETRY_SECONDS + _RETRY_SECONDS_PER_RANK * len(self._view.peers))
        return _compose(self._view.local_rows(failure), failure, serial, payload_of, was_polled=False)

    def ask_lowest(self, message: Message) -> Endpoint | None:
        """Send a request to the lowest rank that answers, and return this rank."""
        for peer in self._answering(_TimeLimit(len(self._view.peers))):
            if self.ask(peer, message):
                return peer
        return None

    def ask(self, peer: Endpoint, message: Message) -> bool:
        return request(peer, message, self._view.own.identity)[0] is Outcome.ANSWERED

    def _start_report(self, failure: Failure | None, serial: int = 0, payload_of: str = "") -> _SharedReport:
        shared = _SharedReport()
        self._background.submit(self._make_report, shared, failure, serial, payload_of)
        return shared

    def _make_report(self, shared: _SharedReport, failure: Failure | None, serial: int, payload_of: str) -> None:
        rows = explainer().poll(self._view.peers, self._view.own, twice=failure is None)
        report = _compose(rows, failure, serial, payload_of, was_polled=True)
        if failure is not None:
            report = self._record.finalize(report)
            # Before any rank fetches the report: a rank with the report leaves, and would then look missing.
            answering = {row.rank for row in rows if row.outcome is Outcome.ANSWERED}
            broadcast_failure(self._view, failure, report, answering)
            # A silent rank may get the report when it runs again; no rank waits for this.
            self._background.submit(broadcast_failure, self._view, failure, report, set(range(len(rows))) - answering)
        shared.report, shared.composed_at = report, time.monotonic()

    def _answering(self, limit: "_TimeLimit") -> Iterator[Endpoint]:
        """The lowest rank, then the other ranks that answer, in order."""
        known = [peer for peer in self._view.peers if peer is not None]
        yield from known[:1]
        # Many requests at a time: a few silent ranks, asked one after the other, would use up the time.
        for start in range(1, len(known), MAX_CONCURRENT_REQUESTS):
            if limit.is_over():
                return
            some = known[start : start + MAX_CONCURRENT_REQUESTS]
            ping = {"request": "record", "failure": None, "report": None}
            answers = request_all(some, ping, self._view.own.identity)
            yield from (peer for peer in some if answers[peer.rank][0] is Outcome.ANSWERED)


class StallReports:
    """The reports on waits outside of calls.

    A rank that waits for long asks the lowest rank that answers. That rank polls all ranks, and sends the report to the
    lowest rank of each host that answers, which shows it.
    """

    def __init__(
        self,
        view: GroupView,
        exchange: ReportExchange,
        background: BackgroundTasks,
        warn_after_seconds: float,
        file: ReportFile,
    ) -> None:
        self._view = view
        self._exchange = exchange
        self._background = background
        self._fresh_seconds = warn_after_seconds / LOOKS  # the ranks of one wait ask within this time
        self._policy = WarningPolicy(view.own.rank, file, warn_after_seconds)
        self._has_asked = False  # about the present wait of this rank
        self._asked: Endpoint | None = None
        self._over_since = 0.0  # when the wait that it has asked about was last seen
        self._shown_on: Sequence[int] = ()  # the ranks that show the last report of this rank
        self._composed_at = float("-inf")
        self._lock, self._log_lock = threading.Lock(), threading.Lock()

    def look(self, watch: StallWatch) -> None:
        """In the thread of the status server: look at the training thread, and ask for a report if one is due."""
        is_due = watch.look()
        if not self._has_asked or watch.is_waiting:
            self._over_since = time.monotonic()
        # An end counts if it lasts: a wait that ends by the loss of a rank ends this process soon.
        is_over = time.monotonic() - self._over_since > self._fresh_seconds / 2
        if is_due or is_over:
            self._has_asked = is_due
            self._background.submit(self._ask_for_report if is_due else self._tell_end)

    def _ask_for_report(self) -> None:
        self._asked = self._exchange.ask_lowest({"request": "stall", "what": "look"})

    def _tell_end(self) -> None:
        """Tell the rank that made the report: it knows where the report is shown. Another rank may answer by now."""
        if has_shown_error():
            return  # it has ended the wait
        message = {"request": "stall", "what": "end"}
        if self._asked is None or not self._exchange.ask(self._asked, message):
            self._exchange.ask_lowest(message)

    def answer(self, message: Message) -> Message:
        what, report = message["what"], message.get("report")
        if what == "look":
            self._background.submit(self._compose)
        elif what == "end":
            self._background.submit(self._end)
        else:
            self._background.submit(self._log, None if report is None else read_as(Report, report))
        return {}

    def _log(self, report: Report | None) -> None:
        """Log a report; None stands for the end of the wait.

        This runs in a thread of its own: a handler of the script may block, and the server must go on to answer.
        """
        with self._log_lock:
            if report is None:
                self._policy.end_stall()
            else:
                self._policy.warn_of_stall(report)

    def _compose(self) -> None:
        """Poll all ranks, and let a rank of each host show the report. The first of the ranks that ask is enough."""
        with self._lock:
            if time.monotonic() - self._composed_at < self._fresh_seconds:
                return
            self._composed_at = time.monotonic()
        rows = explainer().poll(self._view.peers, self._view.own, twice=True)
        report = explainer().stall(rows, self._view.global_ranks, self._view.job_size)
        if report is not None and report.seconds >= self._fresh_seconds:  # else the wait has ended meanwhile
            self._shown_on = report.reporters
            self._show(asdict(report), report.reporters)

    def _end(self) -> None:
        """The wait of a rank has ended. The first of the ranks that tell is enough."""
        with self._lock:
            ranks, self._shown_on, self._composed_at = self._shown_on, (), float("-inf")
        self._show(None, ranks)

    def _show(self, report: Message | None, ranks: Sequence[int]) -> None:
        message = {"request": "stall", "what": "show", "report": report}
        if self._view.own.rank in ranks:
            self.answer(message)
        request_all(self._view.others(ranks), message, self._view.own.identity)


class LocalAnswers:
    """The answers of one rank to ``legacy-ddp watch``, from the Unix socket of the process.

    ``{"request": "process"}``: the processes of the job on this host. ``{"request": "job"}``: what all ranks do. This
    rank polls them, so that no token leaves the ranks.
    """

    def __init__(self, view: GroupView, background: BackgroundTasks, warn_after_seconds: float) -> None:
        self._view = view
        self._background = background
        self._warn_after_seconds = warn_after_seconds
        self._connections: set[socket.socket] = set()  # not yet answered
        self._rows: Sequence[Row] = ()  # of the last poll
        self._polled_at = float("-inf")
        self._lock = threading.Lock()  # one poll at a time

    def take(self, connection: socket.socket, message: Message) -> None:
        """In the thread of the status server: answer in the background, and close the connection."""
        if len(self._connections) >= _MAX_LOCAL_ANSWERS:
            connection.close()
            return
        self._connections.add(connection)
        self._background.submit(self._answer, connection, message)

    def after_fork(self) -> None:
        for connection in self._connections:
            connection.close()

    def _answer(self, connection: socket.socket, message: Message) -> None:
        try:
            kind = message.get("request")
            answer = self._process() if kind == "process" else self._job(message) if kind == "job" else None
            if answer is not None:
                connection.settimeout(ANSWER_SECONDS)  # of all bytes together
                with suppress(OSError):  # the command did not wait for the answer, or does not read it
                    connection.sendall(encode_message({**answer, "format": FORMAT}))
        finally:
            self._connections.discard(connection)
            connection.close()

    def _process(self) -> Message:
        peers, own = [peer for peer in self._view.peers if peer is not None], self._view.own
        return {
            "size": len(self._view.peers),
            "first": min((peer.rank, *vars(peer.identity).values()) for peer in (*peers, own)),
            "pids": sorted({peer.identity.pid for peer in (*peers, own) if _is_local(peer.identity, own.identity)}),
        }

    def _job(self, message: Message) -> Message:
        asked_at = time.monotonic()
        with self._lock:
            if self._polled_at < asked_at:  # else a poll for another command has just ended
                self._rows = explainer().poll(self._view.peers, self._view.own, twice=True)
                self._polled_at = time.monotonic()
            rows = self._rows
        with_stacks = message.get("stacks") is True
        view = self._view
        return explainer().job(
            rows, view.global_ranks, view.job_size, self._warn_after_seconds, with_stacks=with_stacks
        )


def _is_local(process: Identity, own: Identity) -> bool:
    """Whether both processes see the same process numbers. The number of ``process`` then leads to its socket."""
    return process.machine == own.machine if own.machine else process.host == own.host
