"""One collective call of ours on this rank: its place in the sequence, its clock, and its way to the others."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from legacy_ddp import _torch as internals
from legacy_ddp._error_text import first_line
from legacy_ddp._errors import AgreedError, LegacyDDPError, LostPeerError, PeerLostError, SyncTimeoutError
from legacy_ddp._settings import Checks
from legacy_ddp._text import encodable
from legacy_ddp._transport.groups import Groups
from legacy_ddp._transport.operation import Operation
from legacy_ddp._watchdog import HERE, USER_CODE, Failure

# Waiting on gloo is cut into slices so that Python's signal handlers (Ctrl-C) run; one that ends early breaks nothing.
SLICE = timedelta(milliseconds=100)
_FIRST_WARNED_CALL = 3


@dataclass
class Seat:
    """A wrapper's place in a group: its number there, given at its first success, and how many calls it completed."""

    groups: Groups
    member: int | None = None
    calls: Counter[Operation] = field(default_factory=Counter)
    waited_seconds: float = 0.0


class Call:
    """Context of one call: one at a time per group; counts the call when it succeeds.

    Once it has met the others it either succeeds, ends in an agreed error, or leaves the group unusable.

    Raises:
        LegacyDDPError: another call on this group is under way in this process.
        LostPeerError: an earlier failure left the group unusable.
    """

    def __init__(self, seat: Seat, operation: Operation, timeout: timedelta, checks: Checks) -> None:
        self.seat = seat
        self.groups = seat.groups
        self.operation = operation
        self.timeout = timeout
        self.checks = checks
        self.number = 0
        self.member = 0
        self.phase_name = ""
        self.seconds: dict[str, float] = {}
        self._phase_start = 0.0
        self._name = ""
        self._has_met = False  # has begun to communicate: the others count this call, too
        self._is_open = False  # the others are, or may be, waiting for what this rank does next

    def __enter__(self) -> "Call":
        if not self.groups.busy.acquire(blocking=False):
            raise LegacyDDPError(
                f"{self.operation}: another call on this process group is under way in this process, expected one at a "
                "time; call from one thread, and not from a signal handler"
            )
        try:
            self.groups.check_usable()
            self.number = self.seat.calls[self.operation] + 1
            # Equal on ranks that make their first calls in the same order; a failed first call uses no number up.
            self.member = self.seat.member or self.groups.members + 1
            self._name = str(self)
            if self.groups.watch is not None:
                self.groups.watch.begin(self._name, warns=self._warns)
        except BaseException:
            self.groups.busy.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._conclude(error)
        finally:
            HERE.enter(USER_CODE)
            self.groups.busy.release()

    def _conclude(self, error: BaseException | None) -> None:
        if error is None:
            self.seat.calls[self.operation] = self.number
            if self.seat.member is None:
                self.seat.member = self.groups.members = self.member
        watch = self.groups.watch
        if watch is not None:
            watch.end(has_met=self._has_met, succeeded=error is None)
        if error is not None and self._is_open and not isinstance(error, AgreedError):
            self.groups.lose(error)
            if watch is not None and not isinstance(error, LostPeerError):
                watch.tell(error)

    def __str__(self) -> str:
        return f"{self.operation} call {self.number}"

    @property
    def _warns(self) -> bool:
        """A wrapper's first calls wait for compilers, caches and data loaders: not a word of them before a timeout."""
        return self.number >= _FIRST_WARNED_CALL or self.seat.calls[Operation.ALL_REDUCE] >= _FIRST_WARNED_CALL - 1

    def prepare(self) -> None:
        """What is needed to look after the other ranks, if this is the first call here and checks want it.

        Raises:
            OSError: no report file can be made, or no socket.
        """
        if watch := self.groups.open_watch(self.checks):
            watch.begin(self._name, warns=self._warns)

    def meet(self) -> None:
        """Collective, once per group, when headers matched for the first time: ranks learn how to reach each other."""
        if self.groups.has_met:
            return
        watch = self.groups.watch
        cards = self.gather_bytes(b"" if watch is None else watch.card())
        if watch is not None:
            watch.start(cards)
        self.groups.has_met = True

    def settle(self) -> None:
        """Every rank knows that the call ends here: no one waits any more."""
        self._is_open = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, and say that the call is in it."""
        self.phase_name, self._phase_start = name, time.perf_counter()
        self.say(name)
        try:
            with internals.profiled("legacy_ddp", self.operation, name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - self._phase_start

    def say(self, what: str) -> None:
        """Say what this rank does from now on, for the others' reports."""
        HERE.enter(what, self._name)
        if self.groups.watch is not None:
            self.groups.watch.enter(what, self._name)

    def profiled(self, what: object) -> AbstractContextManager[object]:
        """A range of that name inside the phase, for torch's profiler."""
        return internals.profiled("legacy_ddp", self.operation, self.phase_name, what)

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Collective: every rank's host tensor ``row``, of one shape s, as one tensor of shape (size, *s)."""
        rows = torch.empty((self.groups.size, *row.shape), dtype=row.dtype, device="cpu")
        if self.groups.size == 1:
            return rows.copy_(row)
        options = self.options("Allgather")
        self.carry(self.groups.control, lambda group: group.allgather([list(rows.unbind(0))], [row], options))
        return rows

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Collective: the bytes of every rank, of any length each."""
        length = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        lengths = self.gather(length).flatten().tolist()
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device="cpu")
        return [bytes(row[:length].tolist()) for row, length in zip(self.gather(padded), lengths, strict=True)]

    def gather_texts(self, text: str) -> list[str]:
        """Collective: the text of every rank."""
        return [data.decode() for data in self.gather_bytes(encodable(text).encode())]

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: element-wise maximum over the ranks of a host tensor, in place."""
        if self.groups.size > 1:
            options = self.options("Allreduce")
            options.reduceOp = dist.ReduceOp.MAX
            self.carry(self.groups.control, lambda group: group.allreduce([values], options))
        return values

    def options(self, kind: str) -> Any:
        """Options for one operation (``Allreduce``, ``AllToAll``, ...) that may take this call's time."""
        return internals.operation_options(kind, self.timeout)

    def carry(self, group: Any, start: Callable[[Any], Any]) -> None:
        """Start an operation on ``group`` and wait for it."""
        self.wait(group, self.start(group, start))

    def start(self, group: Any, start: Callable[[Any], Any]) -> Any:
        """``start(group)``: from here on the others count on this rank."""
        self._has_met = self._is_open = True
        return start(group)

    def wait(self, group: Any, work: Any) -> None:
        """Wait for ``work``. On gloo a signal handler may raise out of it; elsewhere only the stream waits.

        Raises:
            SyncTimeoutError: a rank did not arrive in time.
            PeerLostError: a connection broke.
        """
        if not self.groups.is_private(group):
            work.wait()
            return
        start = time.perf_counter()
        while (outcome := _poll(work)) is None:
            self._heed_watch(time.perf_counter() - start)
        if isinstance(outcome, RuntimeError):
            raise self.lost_error(outcome, time.perf_counter() - start) from None  # gloo's own words are in it

    def await_notice(self, notice: Callable[[], Any]) -> None:
        """Wait for what ``notice()`` starts on the user's own group, unless it returns None."""
        with self.phase("join"):
            work = notice()
            if work is None:
                return
            self._has_met = self._is_open = True  # the others have this rank's word that it makes the call
            start = time.perf_counter()
            while (outcome := _poll(work)) is not True:
                if isinstance(outcome, RuntimeError):
                    raise self.lost_error(outcome, time.perf_counter() - start) from None
                self.heed(time.perf_counter() - start)

    def heed(self, waited_seconds: float, what: str = "no answer") -> None:
        """To be called now and then while waiting for what has no time limit of its own; ``what`` happened if it ends.

        Raises:
            SyncTimeoutError: it has taken as long as this call may wait.
            LostPeerError: another rank found out that one is lost.
        """
        self._heed_watch(waited_seconds)
        limit = self.timeout.total_seconds()
        if waited_seconds > limit:
            raise self._lost_error(Failure(f"{what} within {limit:g} s", is_late=True))

    def lost_error(self, error: RuntimeError, waited_seconds: float) -> LostPeerError:
        """What an error of the transport, after so long a wait, means to the user."""
        return self._lost_error(self._failure(error, waited_seconds))

    def _heed_watch(self, waited_seconds: float) -> None:
        if self.groups.watch is not None and (failure := self.groups.watch.look(waited_seconds)):
            raise self._lost_error(failure)

    def _failure(self, error: RuntimeError, waited_seconds: float) -> Failure:
        limit, said = self.timeout.total_seconds(), _first_sentence(error)
        # By its words, too: the time may have begun to run while this rank still waited for an earlier collective.
        if waited_seconds >= 0.99 * limit or "timed out" in said.lower():
            return Failure(f"no answer within {limit:g} s", is_late=True)
        return Failure(f"connection lost after {waited_seconds:.2f} s ({said})")

    def _lost_error(self, failure: Failure) -> LostPeerError:
        watch = self.groups.watch
        if watch is None:
            text = f"{self}: {failure.reason}; missing ranks unknown: nobody looks after them with checks off"
            return _kind(failure.is_late)(text, call=self.number, phase=self.phase_name)
        report = watch.conclude(failure)
        text = f"{report.text}\n\n({watch.file.where('also in')})"
        error = _kind(report.is_late)(text, ranks=report.awaited, call=self.number, phase=self.phase_name)
        error.report = report.text
        return error


def _kind(is_late: bool) -> type[LostPeerError]:
    return SyncTimeoutError if is_late else PeerLostError


def _first_sentence(error: RuntimeError) -> str:
    """What gloo says, without the place in its own source before it and the advice behind it."""
    return re.sub(r"^\[[^\]]*\] ?", "", first_line(error)).split(". ")[0]


def check_moment(call: Call) -> None:
    """Refuse a call where communicating cannot be right.

    Raises:
        LegacyDDPError: inside backward, or while a CUDA graph is captured.
    """
    if internals.inside_backward():
        raise LegacyDDPError(
            f"{call.operation} was called from inside backward, expected after it; move it behind loss.backward()"
        )
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise LegacyDDPError(f"{call.operation} was called while a CUDA graph is captured; end the capture before it")


def _poll(work: Any) -> bool | RuntimeError | None:
    """True if ``work`` succeeded, its error if it failed, None if it is still under way after a slice."""
    with suppress(RuntimeError):  # and out of it at once: Ctrl-C comes here, and the slice's end is no cause of it
        work.wait(SLICE)
        return True
    if not work.is_completed():
        return None
    # It may have finished between the slice's end and that question: ask again, now for what really happened.
    try:
        work.wait()
    except RuntimeError as error:
        return error
    return True
