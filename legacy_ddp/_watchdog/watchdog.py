"""The watchdog of a rank: position in calls, answers to other ranks, warnings, and propagation of a failure."""

import logging
import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist

from legacy_ddp._log import logger_of
from legacy_ddp._steps.policy import local_work_text
from legacy_ddp._text import error_line, name_ranks
from legacy_ddp._watchdog.client import (
    Failure,
    Message,
    Outcome,
    decode_endpoint,
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
    was_asked,
    watch_exit,
)
from legacy_ddp._watchdog.exchange import (
    RETRY_SECONDS,
    FailureRecord,
    LocalAnswers,
    ReportExchange,
    StallReports,
    broadcast_failure,
)
from legacy_ddp._watchdog.process import AT_END, Identity
from legacy_ddp._watchdog.reports import Report, ReportFile, WarningPolicy
from legacy_ddp._watchdog.server import BackgroundTasks, StatusServer
from legacy_ddp._watchdog.stall import StallWatch
from legacy_ddp._watchdog.status import (
    LEFT_AFTER_LOSS,
    LEFT_NORMALLY,
    GroupView,
    Payload,
    PayloadWatch,
    own_status,
)

# How long a rank that ends by a lost connection waits for the reason of the rank that ended first.
_CAUSE_SECONDS = 1.0
_ENDS_TOGETHER_SECONDS = 0.25
_NOTED = "_legacy_ddp_noted"


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
        job_size = dist.get_world_size() if dist.is_initialized() else size
        self._view = GroupView(self._server.endpoint, [None] * size, global_ranks, job_size)
        self._status = self._view.status
        self._status.payloads = self._payloads
        self._status.stall = StallWatch(warn_after_seconds)
        self._met = 0  # the number of the last call in which communication had begun
        self.activity = self._status.activity  # of the calls
        self._policy = WarningPolicy(rank, self.file, warn_after_seconds)
        self._record = FailureRecord(self._view, self._policy)
        self._exchange = ReportExchange(self._view, self._record, self._background, warn_after_seconds)
        self._first_end: _End | None = None  # of another rank, known at the end of this one
        self._has_failed_look = False
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
        if self._first_end is not None or error is None or not is_of_transport(error):
            return
        self._first_end = _UNKNOWN_END
        if not self._is_of_process or _NOTED in vars(error):
            return
        vars(error)[_NOTED] = True  # once, whatever the number of groups
        begun = time.monotonic()
        while (found := self._find_first_end(waited := time.monotonic() - begun)) is None and waited < _CAUSE_SECONDS:
            time.sleep(RETRY_SECONDS)
        if found is not None:
            self._first_end = found
            text = f"{found.text}; this rank ends because the connection to it is lost"
            logger_of(self.rank).warning("%s", text, extra={"event": "lost", "ranks": [found.rank]})
            if self._is_next_of(found.rank) and found.rank in self._status.exit_reasons:
                self._spread_end(found.rank)  # after the line: a launcher may end this process at any moment
            end_after(error, self.processes([found.rank]))

    def _find_first_end(self, waited_seconds: float) -> "_End | None":
        """The rank that ended by an error; after a pause also one that ended without, while others went on."""
        reasons = dict(self._status.exit_reasons)
        for rank, reason in reasons.items():
            if is_fault(reason):
                return _End(rank, f"{name_ranks([rank])} {reason}")
        failure = self._record.failure
        if failure is not None and failure.ranks:
            return _End(failure.ranks[0], failure.reason)
        for rank, reason in reasons.items():
            if waited_seconds > _ENDS_TOGETHER_SECONDS and reason.startswith(LEFT_NORMALLY) and not was_asked(reason):
                return _End(rank, f"{name_ranks([rank])} {reason}")
        return None

    def _end_reason(self) -> str:
        """How and where this process ends, for other ranks."""
        if reason := self._record.exit_reason():
            return reason
        if self._first_end is not None:
            return LEFT_AFTER_LOSS + (f": {self._first_end.text}" if self._first_end.text else "")
        work = local_work_text()
        return exit_reason(f"{self._status.call}{work and f' ({work})'}")

    def close(self) -> None:
        """Stop, after sending the exit reason to the neighbours."""
        self.note_end()
        if self in _open:
            _open.remove(self)
        self._server.close(self._end_reason())
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
            status = own_status(self._status, self._view.peers)
            return {**status, "note": self._end_reason()} if status["sample"]["phase"] == AT_END else status
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
            try:
                self._stalls.look(self._status.stall)
            except Exception:  # noqa: BLE001 - this thread must go on to answer the other ranks
                level = logging.DEBUG if self._has_failed_look else logging.WARNING
                text = "a look at the training thread failed: waits outside of calls may go unseen"
                logger_of(self.rank).log(level, text, exc_info=True, extra={"event": "internal_error"})
                self._has_failed_look = True
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
        if is_first and self._is_next_of(rank) and self._is_of_process and is_fault(exit_reason):
            self._background.submit(self._tell_end, rank, exit_reason)

    def _is_next_of(self, rank: int) -> bool:
        """Whether this is the one of its two neighbours that tells of its end."""
        return self.rank == (rank + 1) % len(self._view.peers)

    def _spread_end(self, rank: int) -> None:
        """Let every rank know the exit reason of a neighbour."""
        message = {"request": "end", "rank": rank, "reason": self._status.exit_reasons[rank]}
        request_all(self._view.others(range(len(self._view.peers))), message, self._view.own.identity)

    def _tell_end(self, rank: int, reason: str) -> None:
        """Log the end of a rank by an error, and let every rank know the reason."""
        # An error of every rank, for example of a wrong name in the script, ends this rank, too, and needs no line: all
        # ranks would tell all ranks.
        time.sleep(_ENDS_TOGETHER_SECONDS)
        is_told = any(is_fault(other) for number, other in list(self._status.exit_reasons.items()) if number != rank)
        if has_shown_error() or is_told:
            return
        self._spread_end(rank)
        # Now, and not after another pause: a launcher ends this process soon after the other has ended.
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
    """The watchdog of this process with the largest group, the newest of several: something may keep a dead group."""
    return max(reversed(list(_open)), key=lambda one: len(one._view.peers), default=None)


def _answer_locally(connection: socket.socket, message: Message) -> None:
    """Answer a process of the user on this host: about the largest group of this process."""
    watchdog = _largest()
    if watchdog is None:
        connection.close()
    else:
        watchdog.local.take(connection, message)
