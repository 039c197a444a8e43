"""The watchdog of a rank: position in calls, answers to other ranks, warnings, and propagation of a failure.

One rank composes the report on a wait or a failure, and the other ranks fetch it.
"""

import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from legacy_ddp._explainer import explainer
from legacy_ddp._log import logger_of
from legacy_ddp._steps.policy import local_work_text
from legacy_ddp._text import error_line, name_ranks
from legacy_ddp._watchdog.client import (
    ANSWER_SECONDS,
    MAX_CONCURRENT_REQUESTS,
    PATIENT_SECONDS,
    Endpoint,
    Failure,
    Message,
    Outcome,
    decode_endpoint,
    encode_message,
    read_as,
    request,
    request_all,
)
from legacy_ddp._watchdog.ending import (
    end_after,
    ending_error,
    error_behind,
    exit_reason,
    has_shown_error,
    is_fault,
    is_of_transport,
    watch_exit,
)
from legacy_ddp._watchdog.local import FORMAT
from legacy_ddp._watchdog.process import Identity
from legacy_ddp._watchdog.reports import Report, ReportFile, WarningPolicy
from legacy_ddp._watchdog.server import BackgroundTasks, StatusServer
from legacy_ddp._watchdog.stall import LOOKS, StallWatch
from legacy_ddp._watchdog.status import (
    LEFT_AFTER_LOSS,
    GroupView,
    Payload,
    PayloadWatch,
    Row,
    own_status,
)

# A collective may still complete if a rank ends after its own part of the collective.
_GRACE_SECONDS = 0.5
# Pause between two requests for a report: a thousand ranks must not keep the composing rank from its work.
_RETRY_SECONDS, _RETRY_SECONDS_PER_RANK = 0.05, 0.0005
# Ranks that start to wait together request a report within this time of each other, and must get the same text.
_FRESH_SECONDS = 2.0
_MAX_LOCAL_ANSWERS = 16  # at a time


# How long a rank that ends by a lost connection waits for the reason of the rank that ended first.
_CAUSE_SECONDS = 1.0
_ENDS_TOGETHER_SECONDS = 0.5


class _End(NamedTuple):
    rank: int
    text: str


_UNKNOWN_END = _End(-1, "")


class Watchdog:
    """The watchdog of one rank on one process group."""

    def __init__(
        self,
        rank: int,
        global_ranks: Sequence[int],
        *,
        warn_after_seconds: float,
        report_dir: str | os.PathLike[str] | None,
    ) -> None:
        size = len(global_ranks)
        self.rank = rank
        self.warn_after_seconds = warn_after_seconds
        self._payloads = PayloadWatch(warn_after_seconds)
        self.file = ReportFile(report_dir, rank, size)
        with ExitStack() as opened:
            opened.callback(self.file.close)
            self._background = BackgroundTasks(rank)
            opened.callback(self._background.close)
            self._server = StatusServer(rank, self._answer, self._on_closed, self._look, _answer_locally)
            opened.pop_all()  # nothing failed: all of it stays open
        self._view = GroupView(self._server.endpoint, [None] * size, global_ranks)
        self._status = self._view.status
        self._status.payloads = self._payloads
        self._status.stall = StallWatch(warn_after_seconds)
        self._met = 0  # the number of the last call in which communication had begun
        self.activity = self._status.activity  # of the calls
        self._policy = WarningPolicy(rank, self.file, warn_after_seconds)
        self._record = FailureRecord(self._view, self._policy)
        self._exchange = ReportExchange(self._view, self._record, self._background, warn_after_seconds)
        self._first_end: _End | None = None  # of another rank, known at the end of this one
        self._stalls = StallReports(self._view, self._exchange, self._background, warn_after_seconds, self.file)
        self.local = LocalAnswers(self._view, self._background, warn_after_seconds)
        _open.append(self)
        watch_exit()

    def endpoint(self) -> bytes:
        return self._server.endpoint.encode()

    def start(self, endpoints: Sequence[bytes]) -> None:
        """Begin to answer. ``endpoints``: of all ranks, in the order of the ranks."""
        self._view.peers = [decode_endpoint(rank, data) for rank, data in enumerate(endpoints)]
        # Every rank is in its first call; some ranks may have failed in a call before.
        self._met, self._status.serial = 0, 1
        self._server.start(self._view.peers[(self.rank + 1) % len(self._view.peers)])

    def note_wrapper(self) -> None:
        self._status.has_wrapper = True

    def begin(self, call: str, *, is_early: bool) -> None:
        """This rank enters a call. ``is_early``: one of the first calls, in which ranks may wait for long."""
        status = self._status
        status.activity.enter("plan", call)
        status.begins.append((call, status.activity.mark.since))
        status.serial, status.call, status.in_call = self._met + 1, call, True
        self._policy.begin(is_early=is_early)

    def end(self, *, has_met: bool, succeeded: bool) -> None:
        """This rank leaves the call. ``has_met``: communication has begun, so the other ranks count the call, too."""
        if has_met:
            self._met = self._status.serial
        self._status.serial, self._status.in_call = self._met, False
        if succeeded:
            if self._policy.last_in_full is not None:
                self._policy.end(self._status.call)
        else:
            self._payloads.drop_failed()

    def begin_payload(self, devices: Sequence[torch.device]) -> None:
        is_first = not self._payloads.is_used
        self._payloads.begin(self._status.serial, self._status.call, devices)
        if is_first:
            self._server.wake()

    def end_payload(self) -> None:
        """The payload is issued: watch it until it is complete on the devices. Two launches for each device."""
        self._payloads.issue()

    def check_peers(self, waited_seconds: float) -> Failure | None:
        """Warn if a warning is due; return a failure that any rank has found. To be called repeatedly in a wait."""
        if self._policy.is_due(waited_seconds):
            self._background.submit(self._warn, self._status.serial)
        return self._record.due_failure

    def finalize(self, failure: Failure) -> Report:
        """The final report, equal on all ranks, on disk, and sent to the other ranks."""
        # Before any request: this process may be ended at any moment.
        self._record.record_failure(failure, logs=not failure.is_late)
        return self._record.final_report or self._record.finalize(
            self._exchange.fetch(self._status.serial, self._record.failure)
        )

    def reporter_of(self, report: Report) -> int:
        """The rank of this host that shows ``report`` in full; this rank if the report names none."""
        reporters = self._view.others(report.reporters)
        if self.rank in report.reporters:
            return self.rank
        return next((peer.rank for peer in reporters if peer.identity.host == self._view.own.identity.host), self.rank)

    def notify_failure(self, error: BaseException) -> None:
        """Tell the other ranks of an error that made this rank leave a call. This process may go on."""
        reason = f"{name_ranks([self.rank])} left {self._status.call} with {error_line(error_behind(error))}"
        failure = Failure(reason, ranks=(self.rank,))
        self._record.record_failure(failure)
        broadcast_failure(self._view, failure)

    def processes(self, ranks: Iterable[int]) -> list[Identity]:
        return [peer.identity for peer in self._view.others(ranks)]

    def note_end(self) -> None:
        """At the end of this process: tell which rank ended first, if a lost connection of the script is the error."""
        error = ending_error()
        if self._first_end is not None or error is None or not (self._is_of_process and is_of_transport(error)):
            return
        self._first_end = _UNKNOWN_END
        deadline = time.monotonic() + _CAUSE_SECONDS
        while (found := self._find_first_end()) is None and time.monotonic() < deadline:
            time.sleep(_RETRY_SECONDS)
        if found is not None:
            self._first_end = found
            text = f"{found.text}; this rank ends because the connection to it is lost"
            logger_of(self.rank).warning("%s", text, extra={"event": "lost", "ranks": [found.rank]})
            end_after(error, self.processes([found.rank]))

    def _find_first_end(self) -> "_End | None":
        for rank, reason in list(self._status.exit_reasons.items()):
            if is_fault(reason):
                return _End(rank, f"{name_ranks([rank])} {reason}")
        failure = self._record.failure
        return _End(failure.ranks[0], failure.reason) if failure is not None and failure.ranks else None

    def close(self) -> None:
        """Stop, after sending the exit reason to the neighbours."""
        self.note_end()
        if self in _open:
            _open.remove(self)
        work = local_work_text()
        reason = self._record.exit_reason()
        if self._first_end is not None and not reason:
            reason = LEFT_AFTER_LOSS + (f": {self._first_end.text}" if self._first_end.text else "")
        self._server.close(reason or exit_reason(f"{self._status.call}{work and f' ({work})'}"))
        self._background.close()
        self.file.close()

    def after_fork(self) -> None:
        """In a forked child: release sockets and files of the parent."""
        _open.clear()
        self._server.after_fork()
        self.local.after_fork()
        self.file.after_fork()

    def _answer(self, message: Message) -> Message:
        if message["request"] == "status":
            return own_status(self._status, self._view.peers)
        if message["request"] == "end":
            self._status.exit_reasons[int(message["rank"])] = str(message["reason"])
            return {}
        if message["request"] == "stall":
            return self._stalls.answer(message)
        failure = read_as(Failure, message["failure"]) if message["failure"] else None
        if message["request"] == "report":
            return self._exchange.answer(int(message["serial"]), failure, payload_of=message["payload_of"])
        if failure is not None:
            self._record.record_failure(failure)
        if message["report"]:
            self._record.finalize(read_as(Report, message["report"]))
        return {}

    def _warn(self, serial: int) -> None:
        try:
            report = self._exchange.fetch(serial, None)
            if serial == self._status.serial and self._status.in_call:  # otherwise the wait is over
                self._policy.warn(report)
        finally:
            self._policy.end_check()

    def _look(self) -> float | None:
        """Report a payload that is not complete on a device; return the seconds until the next look."""
        for payload in self._payloads.take_completed():
            if payload.is_told:
                self._policy.tell_completion(payload.call)
        if (late := self._payloads.take_late()) is not None:
            self._background.submit(self._warn_of_payload, late)
        seconds = [self._payloads.seconds_to_look()]
        if self._is_of_process:
            self._stalls.look(self._status.stall)
            seconds.append(self._status.stall.seconds_to_look())
        return min((limit for limit in seconds if limit is not None), default=None)

    def _warn_of_payload(self, payload: Payload) -> None:
        report = self._exchange.fetch(payload.serial, None, payload_of=payload.call)
        if not payload.is_complete():
            payload.is_told = self._policy.tell_in_full(report)

    @property
    def _is_of_process(self) -> bool:
        """Whether this watchdog tells what happens outside of calls: that of the largest group of the process."""
        return _largest() is self

    def _on_closed(self, rank: int, exit_reason: str | None) -> None:
        if exit_reason is None:
            self._background.submit(self._check_neighbour, rank)
            return
        is_first = rank not in self._status.exit_reasons  # with two ranks there are two connections
        self._status.exit_reasons[rank] = exit_reason
        is_next = self.rank == (rank + 1) % len(self._view.peers)  # one of its two neighbours
        if is_first and is_next and self._is_of_process and is_fault(exit_reason):
            self._background.submit(self._tell_end, rank, exit_reason)

    def _tell_end(self, rank: int, reason: str) -> None:
        """Log the end of a rank by an error, and let every rank know the reason."""
        message = {"request": "end", "rank": rank, "reason": reason}
        request_all(self._view.others(range(len(self._view.peers))), message, self._view.own.identity)
        # An error of every rank, for example of a wrong name in the script, ends this rank, too, and needs no line.
        time.sleep(_ENDS_TOGETHER_SECONDS)
        if not has_shown_error() and self in _open:
            text = f"{name_ranks([rank])} {reason}"
            logger_of(self.rank).warning("%s", text, extra={"event": "lost", "ranks": [rank]})

    def _check_neighbour(self, rank: int) -> None:
        """Report a neighbour if it has ended. If its host has vanished, only the timeout shows the loss."""
        peer = self._view.peers[rank]
        own = self._view.own.identity
        outcome = request(peer, {"request": "status"}, own)[0] if peer is not None else Outcome.UNKNOWN
        if outcome in (Outcome.ENDED, Outcome.CLOSED, Outcome.STRANGER):
            what = "ended" if outcome is Outcome.ENDED else "closed its status server"
            failure = Failure(f"{name_ranks([rank])} {what} unexpectedly", ranks=(rank,))
            self._record.record_failure(failure, logs=True)
            broadcast_failure(self._view, failure)


_open: list[Watchdog] = []  # of this process, the oldest first


def _largest() -> Watchdog | None:
    """The watchdog of this process with the largest group, the oldest of several."""
    return max(list(_open), key=lambda one: len(one._view.peers), default=None)


def _answer_locally(connection: socket.socket, message: Message) -> None:
    """Answer a process of the user on this host: about the largest group of this process."""
    watchdog = _largest()
    if watchdog is None:
        connection.close()
    else:
        watchdog.local.take(connection, message)


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
        if logs:
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
        """The exit reason after a failure; otherwise empty."""
        if self.failure is None:
            return ""
        if self._view.own.rank in self.failure.ranks:
            return self.failure.reason
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
        """The answer to a request for a report; empty until it is composed. The first request starts the composition.

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
        a crowded machine the search for this rank may use up the time.
        """
        deadline = time.monotonic() + _report_seconds(len(self._view.peers))
        is_composed = False
        message = {
            "request": "report",
            "serial": serial,
            "failure": failure and asdict(failure),
            "payload_of": payload_of,
        }
        for peer in self._answering(deadline):
            while time.monotonic() < deadline:
                outcome, answer = request(peer, message, self._view.own.identity)
                if self._record.final_report is not None and failure is not None:
                    return self._record.final_report  # of another rank, which arrived meanwhile
                if outcome is not Outcome.ANSWERED:
                    break
                if answer:
                    return read_as(Report, answer)
                if not is_composed:
                    is_composed, deadline = True, time.monotonic() + _report_seconds(len(self._view.peers))
                self._background.sleep_and_run_pending(_RETRY_SECONDS + _RETRY_SECONDS_PER_RANK * len(self._view.peers))
        return _compose(self._view.local_rows(failure), failure, serial, payload_of, was_polled=False)

    def ask_lowest(self, message: Message) -> None:
        """Send a request to the lowest rank that answers."""
        for peer in self._answering(time.monotonic() + _report_seconds(len(self._view.peers))):
            if request(peer, message, self._view.own.identity)[0] is Outcome.ANSWERED:
                return

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

    def _answering(self, deadline: float) -> Iterator[Endpoint]:
        """The lowest rank, then the other ranks that answer, in order."""
        known = [peer for peer in self._view.peers if peer is not None]
        yield from known[:1]
        # Many requests at a time: a few silent ranks, asked one after the other, would use up the time.
        for start in range(1, len(known), MAX_CONCURRENT_REQUESTS):
            if time.monotonic() > deadline:
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
        self._shown_on: Sequence[int] = ()  # the ranks that show the last report of this rank
        self._composed_at = float("-inf")
        self._lock = threading.Lock()

    def look(self, watch: StallWatch) -> None:
        """In the thread of the status server: look at the training thread, and ask for a report if one is due."""
        is_due = watch.look()
        if is_due or (self._has_asked and not watch.is_waiting):
            self._has_asked = is_due
            self._background.submit(
                self._exchange.ask_lowest, {"request": "stall", "what": "look" if is_due else "end"}
            )

    def answer(self, message: Message) -> Message:
        what, report = message["what"], message.get("report")
        if what == "look":
            self._background.submit(self._compose)
        elif what == "end":
            self._background.submit(self._end)
        elif report is not None:
            self._policy.warn_of_stall(read_as(Report, report))
        else:
            self._policy.end_stall()
        return {}

    def _compose(self) -> None:
        """Poll all ranks, and let a rank of each host show the report. The first of the ranks that ask is enough."""
        with self._lock:
            if time.monotonic() - self._composed_at < self._fresh_seconds:
                return
            self._composed_at = time.monotonic()
        rows = explainer().poll(self._view.peers, self._view.own, twice=True)
        report = explainer().stall(rows, self._view.global_ranks)
        if report is not None:
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
        return explainer().job(rows, self._view.global_ranks, self._warn_after_seconds, with_stacks=with_stacks)


def _is_local(process: Identity, own: Identity) -> bool:
    """Whether a process has the same numbers of processes as this one, so that its number finds its socket."""
    return process.machine == own.machine if own.machine else process.host == own.host
