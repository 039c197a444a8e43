"""Looks after the other ranks while this one waits, answers for this one, and writes down what it found."""

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from legacy_ddp._compare import name_ranks
from legacy_ddp._watch.inquiry import Place, ask_everybody, own_state, rows_of
from legacy_ddp._watch.line import CONCURRENT_QUESTIONS, Line, Message, Outcome, Peer, ask, ask_all, decode_peer
from legacy_ddp._watch.report import Report, Row, compose
from legacy_ddp._watch.report_file import ReportFile

logger = logging.getLogger("legacy_ddp")

# A wrapper's first calls wait for compilers, caches and data loaders: nothing is said of them before a timeout.
_FIRST_WARNED_CALL = 3
# How long to wait for the rank that makes the report; it may meet silent ranks and looks twice.
_REPORT_SECONDS = 3.0
# How often to ask for it again: a thousand ranks that ask one must not keep it from its work.
_POLL_SECONDS, _POLL_SECONDS_PER_RANK = 0.05, 0.0005
# Ranks that start waiting together ask within this time of each other, and are to get the same text.
_FRESH_SECONDS = 2.0
# A collective may still complete when a rank that has done its part of it ends.
_GRACE_SECONDS = 0.5

_alive: "weakref.WeakSet[Watchdog]" = weakref.WeakSet()


@dataclass(frozen=True)
class Failure:
    """What ended a call for good, as some rank found it. ``is_late``: nothing broke, somebody was silent for too long.

    ``ranks``: who is lost, where that is known without asking.
    """

    reason: str
    is_late: bool = False
    ranks: tuple[int, ...] = ()


@dataclass
class _Made:
    """A report that this rank makes for all who ask; it is being made until it is there."""

    report: Report | None = None
    at: float = float("inf")


class Watchdog:
    """One per process group and rank.

    Raises:
        OSError: no report file can be made there, or no socket.
    """

    def __init__(
        self, rank: int, size: int, *, warn_after_seconds: float, report_dir: str | os.PathLike[str] | None
    ) -> None:
        self.rank = rank
        self.warn_after_seconds = warn_after_seconds
        self.file = ReportFile(report_dir, rank, size)
        self._line = Line(rank, self._answer, self._on_closed)
        self._peers: list[Peer | None] = [None] * size
        self._place = Place()
        self._next_warning_seconds = warn_after_seconds
        self._is_looking = False
        self._failure: Failure | None = None
        self._failed_at = 0.0
        self._conclusion: Report | None = None
        self._reports: dict[tuple[int, bool], _Made] = {}  # by (serial, is final)
        self._lock = threading.Lock()
        _alive.add(self)
        _let_go_in_forked_children()

    def card(self) -> bytes:
        """What the other ranks need to reach this one, for :meth:`start`."""
        return self._line.me.encode()

    def start(self, cards: Sequence[bytes]) -> None:
        """Know the peers by their cards, in the order of their ranks, and begin to answer."""
        self._peers = [decode_peer(rank, card) for rank, card in enumerate(cards)]
        self._line.start(self._peers[(self.rank + 1) % len(self._peers)])

    def begin(self, call: str, number: int) -> None:
        """This rank enters a call, its wrapper's ``number``-th of that kind."""
        place = self._place
        place.serial, place.call, place.in_call = place.serial + 1, call, True
        self._next_warning_seconds = self.warn_after_seconds if number >= _FIRST_WARNED_CALL else float("inf")

    def end(self) -> None:
        """This rank has left the call."""
        self._place.in_call = False

    def look(self, waited_seconds: float) -> Failure | None:
        """To be called now and then while waiting: warns when it is due; returns what another rank found out."""
        if waited_seconds >= self._next_warning_seconds and not self._is_looking:
            self._next_warning_seconds = 2 * waited_seconds
            self._is_looking = True
            _in_background(self._warn, self._place.serial)
        return self._failure if time.monotonic() - self._failed_at > _GRACE_SECONDS else None

    def conclude(self, failure: Failure) -> Report:
        """The final report, equal on all ranks that ask for it; on disk on return, and the other ranks know of it."""
        self._learn(failure)  # writes what is known here: this process may be ended any moment
        return self._conclusion or self._accept(self._shared_report(self._place.serial, self._failure))

    def close(self) -> None:
        """Stop, after a word to the neighbours."""
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        how = f" with {type(error).__name__}: {_first_line(error)}" if error else ""
        after = f" after {self._place.call}" if self._place.call else ""
        self._line.close(f"left{after}{how}")
        self.file.close()

    def abandon(self) -> None:
        """In a forked child: let go of what is the parent's."""
        self._line.abandon()
        self.file.abandon()

    def _answer(self, message: Message) -> Message:
        if message["ask"] == "state":
            return own_state(self._place, self._peers)
        failure = _failure_from(message["failure"])
        if message["ask"] == "report":
            return self._report_for(int(message["serial"]), failure)
        if failure is not None:
            self._learn(failure)
        if message["report"]:
            self._accept(_report_from(message["report"]))
        return {}

    def _report_for(self, serial: int, failure: Failure | None) -> Message:
        """The report if it is made; else begin to make it, whoever asks first."""
        key = (serial, failure is not None)
        with self._lock:
            made = self._reports.get(key)
            if made is None or (failure is None and time.monotonic() - made.at > _FRESH_SECONDS):
                made = _Made()
                self._reports = {key: made}  # earlier ones are of no use any more
                _in_background(self._make_report, made, failure)
        return asdict(made.report) if made.report else {}

    def _make_report(self, made: _Made, failure: Failure | None) -> None:
        rows = ask_everybody(self._peers, self._line.me, twice=failure is None)
        report = _compose(rows, failure)
        if failure is not None:
            # Before anybody has it: who has it leaves, and would be missing then. Who was silent would cost time again.
            self._spread(failure, report, [row.rank for row in rows if row.outcome is Outcome.ANSWERED])
        made.report, made.at = report, time.monotonic()

    def _shared_report(self, serial: int, failure: Failure | None) -> Report:
        """The report of the lowest rank that answers, so that all who ask get the same; from here if nobody answers."""
        give_up = time.monotonic() + _REPORT_SECONDS
        question = {"ask": "report", "serial": serial, "failure": failure and asdict(failure)}
        for peer in self._answering():
            while time.monotonic() < give_up:
                outcome, answer = ask(peer, question, self._line.me.identity)
                if outcome is not Outcome.ANSWERED:
                    break
                if answer:
                    return _report_from(answer)
                time.sleep(_POLL_SECONDS + _POLL_SECONDS_PER_RANK * len(self._peers))
        return self._report_from_here(failure)

    def _answering(self) -> Iterator[Peer]:
        """Who may answer, by rank: the first, and if it does not, those behind it who do. These are asked many at once,
        for a few silent ones would use up the time."""
        known = [peer for peer in self._peers if peer is not None]
        yield from known[:1]
        for start in range(1, len(known), CONCURRENT_QUESTIONS):
            some = known[start : start + CONCURRENT_QUESTIONS]
            answers = ask_all(some, {"ask": "note", "failure": None, "report": None}, self._line.me.identity)
            yield from (peer for peer in some if answers[peer.rank][0] is Outcome.ANSWERED)

    def _report_from_here(self, failure: Failure | None) -> Report:
        """What is known without asking anybody."""
        answers = {self.rank: (Outcome.ANSWERED, own_state(self._place, self._peers))}
        lost = dict.fromkeys(failure.ranks if failure else (), (Outcome.GONE, None))
        return _compose(rows_of(self._peers, {**answers, **lost}), failure)

    def _warn(self, serial: int) -> None:
        try:
            report = self._shared_report(serial, None)
            if serial != self._place.serial or not self._place.in_call:
                return  # it got on meanwhile
            if report.is_harmless:
                text = report.head
            else:
                self._next_warning_seconds = float("inf")
                self.file.append(report.text)
                text = f"{report.text}\n(reports of this rank: {self.file.path})"
            if self.rank in report.speakers:
                logger.warning("%s", text)
        finally:
            self._is_looking = False

    def _on_closed(self, rank: int, goodbye: str | None) -> None:
        """A neighbour's connection ended."""
        if goodbye is None:
            _in_background(self._look_after, rank)
        else:
            self._place.goodbyes[rank] = goodbye

    def _look_after(self, rank: int) -> None:
        """Is the neighbour gone, or only its connection? Where a host vanished, waiting and the timeout decide."""
        peer = self._peers[rank]
        if peer is not None and ask(peer, {"ask": "state"}, self._line.me.identity)[0] is Outcome.GONE:
            failure = Failure(f"{name_ranks([rank])} ended without a word", ranks=(rank,))
            self._learn(failure)
            self._spread(failure, None, range(len(self._peers)))

    def _learn(self, failure: Failure) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure, self._failed_at = failure, time.monotonic()
        self.file.append(f"at first, from this rank alone:\n{self._report_from_here(failure).text}")

    def _accept(self, report: Report) -> Report:
        """Take the final report, unless there is one already; it is on disk on return."""
        with self._lock:
            if self._conclusion is None:
                self.file.append(report.text)
                self._conclusion = report
            return self._conclusion

    def _spread(self, failure: Failure, report: Report | None, ranks: Iterable[int]) -> None:
        others = [peer for rank in ranks if rank != self.rank and (peer := self._peers[rank]) is not None]
        message = {"ask": "note", "failure": asdict(failure), "report": report and asdict(report)}
        ask_all(others, message, self._line.me.identity)


def _compose(rows: Sequence[Row], failure: Failure | None) -> Report:
    return compose(rows, failure.reason, is_late=failure.is_late) if failure else compose(rows)


def _failure_from(said: dict[str, Any] | None) -> Failure | None:
    return Failure(**{**said, "ranks": tuple(said["ranks"])}) if said else None


def _report_from(said: Message) -> Report:
    return Report(**{**said, "awaited": tuple(said["awaited"]), "speakers": tuple(said["speakers"])})


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


def _in_background(function: Callable[..., None], *args: object) -> None:
    threading.Thread(target=function, args=args, name="legacy_ddp watch", daemon=True).start()


@cache
def _let_go_in_forked_children() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    for watchdog in list(_alive):
        watchdog.abandon()
