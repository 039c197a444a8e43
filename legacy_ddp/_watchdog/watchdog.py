"""Looks after the other ranks while this one waits, answers for this one, and writes down what it found."""

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
from legacy_ddp._watchdog.background import Background
from legacy_ddp._watchdog.client import CONCURRENT_QUESTIONS, Message, Outcome, Peer, ask, ask_all, decode_peer
from legacy_ddp._watchdog.failure import Failure, decode_failure
from legacy_ddp._watchdog.log_policy import Voice
from legacy_ddp._watchdog.report import LEFT_FOR_A_LOSS, Report, Row, compose, decode_report, say_loss
from legacy_ddp._watchdog.report_file import ReportFile
from legacy_ddp._watchdog.server import Line
from legacy_ddp._watchdog.status import Place, ask_everybody, own_state, rows_of

# How long to wait for the rank that makes the report; it may meet silent ranks and looks twice.
_REPORT_SECONDS = 3.0
# How often to ask for it again: a thousand ranks that ask one must not keep it from its work.
_POLL_SECONDS, _POLL_SECONDS_PER_RANK = 0.05, 0.0005
# Ranks that start waiting together ask within this time of each other, and are to get the same text.
_FRESH_SECONDS = 2.0
# A collective may still complete when a rank that has done its part of it ends.
_GRACE_SECONDS = 0.5

_alive: "weakref.WeakSet[Watchdog]" = weakref.WeakSet()


@dataclass
class _Made:
    """A report that this rank makes for all who ask; it is being made until it is there."""

    report: Report | None = None
    at: float = float("inf")


class Watchdog:
    """One per process group and rank.

    Raises:
        OSError: no report file can be made there, or no socket, or no thread be started.
    """

    def __init__(
        self, rank: int, size: int, *, warn_after_seconds: float, report_dir: str | os.PathLike[str] | None
    ) -> None:
        self.rank = rank
        self.warn_after_seconds = warn_after_seconds
        self.file = ReportFile(report_dir, rank, size)
        with ExitStack() as made:
            made.callback(self.file.close)
            self._background = Background(rank)
            made.callback(self._background.close)
            self._line = Line(rank, self._answer, self._on_closed)
            made.pop_all()
        self._peers: list[Peer | None] = [None] * size
        self._place = Place()
        self._fresh_seconds = min(_FRESH_SECONDS, warn_after_seconds / 2)
        self._voice = Voice(rank, self.file, warn_after_seconds)
        self._failure: Failure | None = None
        self._failed_at = 0.0
        self._named: tuple[int, ...] = ()  # when it was told first
        self._conclusion: Report | None = None
        self._warnings: dict[int, _Made] = {}  # by serial
        self._final: _Made | None = None
        self._lock = threading.Lock()
        _alive.add(self)
        _let_go_in_forked_children()

    def card(self) -> bytes:
        """What the other ranks need to reach this one, for :meth:`start`."""
        return self._line.me.encode()

    def start(self, cards: Sequence[bytes]) -> None:
        """Know the peers by their cards, in the order of their ranks, and begin to answer."""
        self._peers = [decode_peer(rank, card) for rank, card in enumerate(cards)]
        self._place.serial = 1  # every rank is in its first call; some may have failed in one of their own before
        self._line.start(self._peers[(self.rank + 1) % len(self._peers)])

    def begin(self, call: str, *, warns: bool) -> None:
        """This rank enters a call. ``warns``: whether long waiting in it is worth a word."""
        place = self._place
        place.activity.enter("plan", call)
        place.serial, place.call, place.in_call = place.serial + 1, call, True
        self._voice.begin(warns=warns)

    def enter(self, phase: str, call: str) -> None:
        """This rank goes on to the next phase of the call."""
        self._place.activity.enter(phase, call)

    def end(self, *, has_met: bool, succeeded: bool) -> None:
        """This rank has left the call; ``has_met``: the others are in it, too, and count it."""
        self._place.in_call = False
        if not has_met:
            self._place.serial -= 1
        if succeeded:
            self._voice.end(self._place.call)

    def look(self, waited_seconds: float) -> Failure | None:
        """To be called now and then while waiting: warns when it is due; returns what another rank found out."""
        if self._voice.is_due(waited_seconds):
            self._background.do(self._warn, self._place.serial)
        return self._failure if time.monotonic() - self._failed_at > _GRACE_SECONDS else None

    def conclude(self, failure: Failure) -> Report:
        """The final report, equal on all ranks that ask for it; on disk on return, and the other ranks know of it."""
        # Writes and says what is known here: this process may be ended any moment.
        self._learn(failure, says=not failure.is_late)
        return self._conclusion or self._accept(self._shared_report(self._place.serial, self._failure))

    def tell(self, error: BaseException) -> None:
        """This rank has left a call that the others wait in, and may live on: let them know at once."""
        what = f"{name_ranks([self.rank])} left {self._place.call} with {error_line(error)}"
        failure = Failure(what, ranks=(self.rank,))
        self._learn(failure)
        self._spread(failure, None, range(len(self._peers)))

    def close(self) -> None:
        """Stop, after a word to the neighbours."""
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        how = f"with {error_line(error)}" if error else "in order; did it run out of data?"
        goodbye = f"left after {self._place.call} {how}"
        if self._failure is not None:
            goodbye = self._failure.reason if self.rank in self._failure.ranks else self._word_of_a_loss()
        self._line.close(goodbye)
        self._background.close()
        self.file.close()

    def _word_of_a_loss(self) -> str:
        """For who missed the report: a rank that was stopped, and goes on when all others have left."""
        return f"{LEFT_FOR_A_LOSS}: {self._conclusion.summary}" if self._conclusion else LEFT_FOR_A_LOSS

    def abandon(self) -> None:
        """In a forked child: let go of what is the parent's."""
        self._line.abandon()
        self.file.abandon()

    def _answer(self, message: Message) -> Message:
        if message["ask"] == "state":
            return own_state(self._place, self._peers)
        failure = decode_failure(message["failure"])
        if message["ask"] == "report":
            return self._report_for(int(message["serial"]), failure)
        if failure is not None:
            self._learn(failure)
        if message["report"]:
            self._accept(decode_report(message["report"]))
        return {}

    def _report_for(self, serial: int, failure: Failure | None) -> Message:
        """The report if it is made; else begin to make it, whoever asks first. The final one answers every question."""
        with self._lock:
            made = self._final
            if made is None and failure is not None:
                made = self._final = _Made()
                self._background.do(self._make_report, made, failure)
            elif made is None:
                made = self._warnings.get(serial)
                if made is None or time.monotonic() - made.at > self._fresh_seconds:
                    made = _Made()
                    # Ranks may be in two calls at a time, not more.
                    recent = {other: old for other, old in self._warnings.items() if abs(other - serial) <= 1}
                    self._warnings = {**recent, serial: made}
                    self._background.do(self._make_report, made, None)
        return asdict(made.report) if made.report else {}

    def _make_report(self, made: _Made, failure: Failure | None) -> None:
        rows = ask_everybody(self._peers, self._line.me, twice=failure is None)
        report = _compose(rows, failure)
        if failure is not None:
            report = self._accept(report)
            # Before anybody has it: who has it leaves, and would be missing then.
            answering = {row.rank for row in rows if row.outcome is Outcome.ANSWERED}
            self._spread(failure, report, answering)
            # Who was silent may find it when it can look again; nobody waits for that.
            self._background.do(self._spread, failure, report, set(range(len(rows))) - answering)
        made.report, made.at = report, time.monotonic()

    def _shared_report(self, serial: int, failure: Failure | None) -> Report:
        """The report of the lowest rank that answers, so that all who ask get the same; from here if nobody answers."""
        give_up = time.monotonic() + _REPORT_SECONDS
        question = {"ask": "report", "serial": serial, "failure": failure and asdict(failure)}
        for peer in self._answering(give_up):
            while time.monotonic() < give_up:
                outcome, answer = ask(peer, question, self._line.me.identity)
                if outcome is not Outcome.ANSWERED:
                    break
                if answer:
                    return decode_report(answer)
                self._background.help(_POLL_SECONDS + _POLL_SECONDS_PER_RANK * len(self._peers))
        return _compose(self._rows_from_here(failure), failure, is_inquiry=False)

    def _answering(self, give_up: float) -> Iterator[Peer]:
        """Who may answer, by rank: the first, and if it does not, those behind it who do. These are asked many at once,
        for a few silent ones would use up the time."""
        known = [peer for peer in self._peers if peer is not None]
        yield from known[:1]
        for start in range(1, len(known), CONCURRENT_QUESTIONS):
            if time.monotonic() > give_up:
                return
            some = known[start : start + CONCURRENT_QUESTIONS]
            answers = ask_all(some, {"ask": "note", "failure": None, "report": None}, self._line.me.identity)
            yield from (peer for peer in some if answers[peer.rank][0] is Outcome.ANSWERED)

    def _rows_from_here(self, failure: Failure | None) -> list[Row]:
        """What is known without asking anybody."""
        answers = {self.rank: (Outcome.ANSWERED, own_state(self._place, self._peers))}
        lost = dict.fromkeys(failure.ranks if failure else (), (Outcome.GONE, None))
        return rows_of(self._peers, {**lost, **answers})

    def _warn(self, serial: int) -> None:
        try:
            report = self._shared_report(serial, None)
            if serial == self._place.serial and self._place.in_call:  # else it got on meanwhile
                self._voice.say(report)
        finally:
            self._voice.look_away()

    def _on_closed(self, rank: int, goodbye: str | None) -> None:
        """A neighbour's connection ended."""
        if goodbye is None:
            self._background.do(self._look_after, rank)
        else:
            self._place.goodbyes[rank] = goodbye

    def _look_after(self, rank: int) -> None:
        """Is the neighbour gone, or only its connection? Where a host vanished, waiting and the timeout decide."""
        peer = self._peers[rank]
        if peer is not None and ask(peer, {"ask": "state"}, self._line.me.identity)[0] is Outcome.GONE:
            failure = Failure(f"{name_ranks([rank])} ended without a word", ranks=(rank,))
            self._learn(failure, says=True)
            self._spread(failure, None, range(len(self._peers)))

    def _learn(self, failure: Failure, *, says: bool = False) -> None:
        """Know of a failure if it is the first, and write it down. ``says``: found here, so tell it, too.

        One that is found here is told as well if the first named nobody: gloo may have been faster than the kernel.
        """
        with self._lock:
            if self._failure is not None and (self._named or not says):
                return
            if self._failure is None:
                self._failure, self._failed_at = failure, time.monotonic()
            rows = self._rows_from_here(failure)
            report = _compose(rows, failure, is_inquiry=False)
            self._named = report.awaited
        self._voice.file(f"before anybody was asked, from this rank alone:\n{report.text}")
        if says:
            who = "" if failure.ranks else report.summary
            self._voice.tell_of_loss(say_loss(rows[self.rank], failure.reason, who))

    def _accept(self, report: Report) -> Report:
        """Take the final report, unless there is one already; it is on disk on return."""
        with self._lock:
            if self._conclusion is None:
                self._voice.file(report.text)
                self._conclusion = report
            return self._conclusion

    def _spread(self, failure: Failure, report: Report | None, ranks: Iterable[int]) -> None:
        others = [peer for rank in ranks if rank != self.rank and (peer := self._peers[rank]) is not None]
        message = {"ask": "note", "failure": asdict(failure), "report": report and asdict(report)}
        ask_all(others, message, self._line.me.identity)


def _compose(rows: Sequence[Row], failure: Failure | None, *, is_inquiry: bool = True) -> Report:
    if failure is None:
        return compose(rows)
    return compose(rows, failure.reason, is_late=failure.is_late, lost=failure.ranks, is_inquiry=is_inquiry)


@cache
def _let_go_in_forked_children() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    for watchdog in list(_alive):
        watchdog.abandon()
