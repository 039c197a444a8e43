"""The watchdog of a rank: position in calls, answers to other ranks, warnings, and notification of failures."""

import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cache

from legacy_ddp._compare import name_ranks
from legacy_ddp._error_text import error_line
from legacy_ddp._fork import run_in_children
from legacy_ddp._watchdog.background import BackgroundTasks
from legacy_ddp._watchdog.client import Message, Outcome, decode_endpoint, request
from legacy_ddp._watchdog.ending import end_text, error_behind
from legacy_ddp._watchdog.exchange import ReportExchange
from legacy_ddp._watchdog.failure import Failure, decode_failure
from legacy_ddp._watchdog.log_policy import WarningPolicy
from legacy_ddp._watchdog.processes import Identity
from legacy_ddp._watchdog.propagation import FailureRecord, broadcast_failure
from legacy_ddp._watchdog.report import Report, decode_report
from legacy_ddp._watchdog.report_file import ReportFile
from legacy_ddp._watchdog.script_end import watch_exit
from legacy_ddp._watchdog.server import StatusServer
from legacy_ddp._watchdog.status import GroupView, own_status

_alive: "weakref.WeakSet[Watchdog]" = weakref.WeakSet()


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
        self._view = GroupView(self._server.endpoint, [None] * size)
        self._status = self._view.status
        self.activity = self._status.activity  # of the calls
        self._policy = WarningPolicy(rank, self.file, warn_after_seconds)
        self._record = FailureRecord(self._view, self._policy)
        self._exchange = ReportExchange(self._view, self._record, self._background, warn_after_seconds)
        _alive.add(self)
        _register_after_fork()
        watch_exit()

    def endpoint(self) -> bytes:
        """The endpoint of this rank, encoded for :meth:`start` on every rank."""
        return self._server.endpoint.encode()

    def start(self, endpoints: Sequence[bytes]) -> None:
        """Take the endpoints of all ranks, in the order of the ranks, and begin to answer."""
        self._view.peers = [decode_endpoint(rank, data) for rank, data in enumerate(endpoints)]
        self._status.serial = 1  # every rank is in its first call; some ranks may have failed in a call before
        self._server.start(self._view.peers[(self.rank + 1) % len(self._view.peers)])

    def begin(self, call: str, *, warns: bool) -> None:
        """This rank enters a call. ``warns``: whether a long wait in the call is worth a warning."""
        status = self._status
        status.activity.enter("plan", call)
        status.serial, status.call, status.in_call = status.serial + 1, call, True
        self._policy.begin(warns=warns)

    def end(self, *, has_met: bool, succeeded: bool) -> None:
        """This rank leaves the call. ``has_met``: communication has begun, so the other ranks count the call, too."""
        self._status.in_call = False
        if not has_met:
            self._status.serial -= 1
        if succeeded:
            self._policy.end(self._status.call)

    def check_peers(self, waited_seconds: float) -> Failure | None:
        """Warn if a warning is due; return a failure found by any rank. To be called repeatedly during a wait."""
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

    def notify_failure(self, error: BaseException) -> None:
        """Notify the other ranks, at once, of an error that made this rank leave a call; this process may live on."""
        reason = f"{name_ranks([self.rank])} left {self._status.call} with {error_line(error_behind(error))}"
        failure = Failure(reason, ranks=(self.rank,))
        self._record.record_failure(failure)
        broadcast_failure(self._view, failure)

    def processes(self, ranks: Iterable[int]) -> list[Identity]:
        """The known processes of ``ranks``, without this process."""
        return [peer.identity for peer in self._view.others(ranks)]

    def close(self) -> None:
        """Stop, after sending the exit reason to the neighbours."""
        self._server.close(self._record.exit_reason() or f"left after {self._status.call} {end_text()}")
        self._background.close()
        self.file.close()

    def after_fork(self) -> None:
        """In a forked child: release sockets and files of the parent."""
        self._server.after_fork()
        self.file.after_fork()

    def _answer(self, message: Message) -> Message:
        if message["request"] == "status":
            return own_status(self._status, self._view.peers)
        failure = decode_failure(message["failure"])
        if message["request"] == "report":
            return self._exchange.answer(int(message["serial"]), failure)
        if failure is not None:
            self._record.record_failure(failure)
        if message["report"]:
            self._record.finalize(decode_report(message["report"]))
        return {}

    def _warn(self, serial: int) -> None:
        try:
            report = self._exchange.fetch(serial, None)
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
        """Report a neighbour if its process has ended. If the host vanished, only the timeout shows the loss."""
        peer = self._view.peers[rank]
        own = self._view.own.identity
        if peer is not None and request(peer, {"request": "status"}, own)[0] is Outcome.ENDED:
            failure = Failure(f"{name_ranks([rank])} ended unexpectedly", ranks=(rank,))
            self._record.record_failure(failure, logs=True)
            broadcast_failure(self._view, failure)


@cache
def _register_after_fork() -> None:
    run_in_children(_after_fork)


def _after_fork() -> None:
    for watchdog in list(_alive):
        watchdog.after_fork()
