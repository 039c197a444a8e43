"""A collective call on this rank: its number, its phases and their times, its success or failure."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import get_ident
from time import monotonic, perf_counter
from types import FrameType, TracebackType
from typing import Any

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._errors import AgreedError, LegacyDDPError, LostPeerError, PeerError, SyncTimeoutError
from legacy_ddp._interrupts import has_left
from legacy_ddp._log import shorten_display
from legacy_ddp._ranks.header import Operation
from legacy_ddp._ranks.private_groups import Groups, join_hosts
from legacy_ddp._ranks.wait import Gatherer
from legacy_ddp._settings import Settings
from legacy_ddp._torch import device as devices
from legacy_ddp._watchdog import USER_CODE, end_after, forget_turn, process_activity
from legacy_ddp._watchdog.process import ActivityMark, new_mark

_EARLY_CALLS = 2
_NO_RANGE = nullcontext()
# Of every living wrapper that has met the other ranks. A list, because every call asks for its length.
_numbered: "list[weakref.ref[GroupState]]" = []


@dataclass(eq=False)
class GroupState:
    """State of a wrapper on a group."""

    groups: Groups
    wrapper_id: int | None = None  # set at the first success
    calls: Counter[Operation] = field(default_factory=Counter)  # numbers of completed calls
    # Operation and number of the last call in which all ranks held the same parameters, and what they held.
    agreed: tuple[Operation, int, Mapping[str, str]] | None = None
    waited_seconds: float = 0.0  # for the headers of the other ranks, in the last all_reduce
    # Names of the parameters with a sparse result in any call until now; equal on all ranks.
    sparse: set[str] = field(default_factory=set)


class Call(Gatherer):
    """Context of a call, counted on success. A group has a single call at a time.

    ``ignored``: the names in ``ignore``. ``module_class``: the class of the module, empty for parameters without one.
    ``is_early``: one of the first calls, in which a long wait is nothing unusual.

    After the first communication a call succeeds, raises an error on all ranks, or leaves the group unusable.

    Raises:
        LegacyDDPError: a call on this group is under way in this process.
        LostPeerError: an earlier failure left the group unusable.
    """

    def __init__(
        self,
        group_state: GroupState,
        operation: Operation,
        settings: Settings,
        module_class: str,
    ) -> None:
        super().__init__(group_state.groups, settings.timeout_seconds)
        self.group_state = group_state
        self.operation = operation
        self.settings = settings
        self.checks = settings.checks
        self.ignored = settings.ignore  # names
        self.module_class = module_class
        self.wrapper_id = 0
        self.seconds: dict[str, float] = {}
        self.open_phases: list[tuple[str, float, AbstractContextManager[object] | None]] = []  # the innermost last
        self._phase_end = PhaseEnd(self)
        self._failed_alike = False
        self._is_ended = False

    def __enter__(self) -> "Call":
        self.thread = get_ident()
        self.frame: FrameType | None = sys._getframe(1)
        if self.groups.busy.take(self) is not self:
            self._take_over()
        try:
            if self.groups.lost:
                raise self.groups.lost_error()
            self.number = self.group_state.calls[self.operation] + 1
            # Equal on ranks that make their first calls in the same order. A failed first call leaves its number free.
            self.wrapper_id = self.group_state.wrapper_id or self.groups.wrapper_count + 1
            self.name = self.full_name = f"{self.operation.label} call {self.number}"
            # The first calls of a wrapper wait for compilers, caches and data loaders: these are told calmly.
            number = max(self.number, self.group_state.calls[Operation.ALL_REDUCE] + 1)
            self.is_early = number <= _EARLY_CALLS
            if wrapper := self.wrapper_name:
                self.full_name = f"{self.name} of {wrapper}"
            if self.groups.watchdog is not None:
                self.groups.watchdog.begin(self.full_name, is_early=self.is_early)
        except BaseException:
            self.frame = None
            self.groups.busy.release(self)
            raise
        return self

    def _take_over(self) -> None:
        # An exception of a signal handler may come before the block of a call or at its end, and the call is never
        # ended. The function with the block has then returned: end the call here.
        while (other := self.groups.busy.take(self)) is not self:
            if not has_left(other):
                raise LegacyDDPError(f"{self.operation}: {_refusal(other)}")
            left = LegacyDDPError(f"{other.operation} was ended by an exception of a signal handler")
            other.__exit__(type(left), left, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            try:
                if not self._is_ended:
                    self._end_call(error)
            except BaseException as interrupt:  # of a signal handler
                self._end_call(error or interrupt)
                raise
        finally:
            try:
                process_activity.enter(USER_CODE)
            finally:
                self.frame = None
                self.groups.busy.release(self)

    def _end_call(self, error: BaseException | None) -> None:
        """Count a success. After an error of this rank alone, tell the other ranks, and refuse further calls.

        Called again if an exception interrupts it. A call that is not counted yet has then failed, because the other
        ranks may have counted it.
        """
        if error is None:
            forget_turn()
            if self.groups.counting_device is not None:
                self.groups.note_issued()
            if self.group_state.wrapper_id is None:
                self.groups.wrapper_count = max(self.groups.wrapper_count, self.wrapper_id)
                _numbered.append(weakref.ref(self.group_state, _numbered.remove))
                self.group_state.wrapper_id = self.wrapper_id
            self.group_state.calls[self.operation] = self.number  # last: now the call has succeeded
        elif self.number and self.group_state.calls[self.operation] == self.number:
            error = None
        watchdog = self.groups.watchdog
        if watchdog is not None:
            watchdog.end(has_met=self._has_communicated, succeeded=error is None)
        if error is not None and self._peers_waiting and not isinstance(error, AgreedError):
            self.groups.mark_failed(error)
            if watchdog is not None and not isinstance(error, LostPeerError):
                watchdog.notify_failure(error)
            self.groups.close_star(error)  # after the notice, because the other ranks then ask for the reason at once
        if error is not None:
            is_agreed = isinstance(error, AgreedError) or self._failed_alike
            shorten_display(error, is_agreed=is_agreed, rank=self.groups.rank, first=self.groups.global_ranks[0])
            self._end_in_order(error, is_agreed=is_agreed)
        self._is_ended = True

    def _end_in_order(self, error: BaseException, *, is_agreed: bool) -> None:
        """Let the process of the rank at fault end before this process, because a launcher names the rank that ends
        first. After an agreed error without such a rank, the rank that shows the traceback ends first."""
        if is_loss := isinstance(error, LostPeerError):
            ranks = () if isinstance(error, SyncTimeoutError) else error.ranks  # a silent rank does not end
        elif is_agreed:
            ranks = error.ranks[:1] if isinstance(error, PeerError) else (0,)
        else:
            return
        if is_loss or self.groups.rank not in ranks:
            watchdog = self.groups.watchdog
            end_after(error, watchdog.processes(ranks) if watchdog is not None else ())

    def __str__(self) -> str:
        return self.name

    @property
    def wrapper_name(self) -> str:
        """``wrapper 2 (Critic)``; empty if no other wrapper of this process has made a call."""
        if len(_numbered) + (self.group_state.wrapper_id is None) < 2:
            return ""
        return f"wrapper {self.wrapper_id}{self.module_class and f' ({self.module_class})'}"

    def name_in_full(self, text: str) -> str:
        """``text``, with the full name of this call in place of its name at the beginning."""
        head = f"{self.name}:"
        return f"{self.full_name}:{text.removeprefix(head)}" if text.startswith(head) else text

    def prepare_watchdog(self) -> None:
        """Make the watchdog, unless checks are off, before endpoints are exchanged. OSError: no file or socket."""
        if watchdog := self.groups.open_watchdog(self.checks):
            watchdog.begin(self.full_name, is_early=self.is_early)

    def exchange_endpoints(self) -> None:
        """Collective, after the first matching headers of a group: exchange the endpoints of the watchdogs, and connect
        the hosts. Never a second time (``endpoints_exchanged``)."""
        watchdog = self.groups.watchdog
        endpoints = self.gather_objects("" if watchdog is None else watchdog.endpoint().decode())
        if watchdog is not None:
            watchdog.start([endpoint.encode() for endpoint in endpoints])
        join_hosts(self.groups, self.first_problem)
        self.groups.endpoints_exchanged = True

    def mark_finished(self) -> None:
        """Record that every rank failed with the same text: no rank waits any more."""
        self._peers_waiting, self._failed_alike = False, True

    def phase(self, name: str) -> "PhaseEnd":
        """Time the block ``with call.phase(name):``, and show ``name`` in the reports of the watchdog."""
        self.phase_name = name
        # As process_activity.enter(), without its Python call in each phase.
        changes = process_activity.mark.changes + 1
        mark = process_activity.mark = new_mark(ActivityMark, (self.full_name, name, monotonic(), get_ident(), changes))
        if self.groups.watchdog is not None:
            self.groups.watchdog.activity.mark = mark
        profiler = None
        if internals.is_profiling():
            profiler = internals.profiler_range("legacy_ddp", self.operation.label, name)
            profiler.__enter__()
        self.open_phases.append((name, perf_counter(), profiler))
        return self._phase_end

    @contextmanager
    def payload(self, places: Sequence[torch.device]) -> Iterator[None]:
        """The phase of the payload. The watchdog watches the devices ``places`` also after the end of the call."""
        watchdog = self.groups.watchdog
        # On gloo the host waits in the call itself.
        watched = []
        if watchdog is not None:
            watched = [place for place in places if not self.groups.is_private(self.groups.payload(place))]
        with self.phase("payload"):
            if watchdog is not None and watched:
                watchdog.begin_payload(watched)
            yield
            if watchdog is not None and watched:
                watchdog.end_payload()

    def set_phase(self, text: str) -> None:
        """Show ``text`` in the watchdog's reports as the present activity of this rank."""
        process_activity.enter(text, self.full_name)
        if self.groups.watchdog is not None:
            self.groups.watchdog.activity.mark = process_activity.mark

    def profiled(self, what: object) -> AbstractContextManager[object]:
        """A range ``what`` inside the phase, for torch's profiler."""
        if not internals.is_profiling():
            return _NO_RANGE
        return internals.profiler_range("legacy_ddp", self.operation.label, self.phase_name, what)

    def await_notice(self, notice: Callable[[], Any]) -> None:
        with self.phase("join"):
            if (work := notice()) is not None:
                self.wait_until_deadline(work)


def _refusal(other: Call) -> str:
    operation = other.operation.label
    if other.thread == get_ident():
        return (
            f"called inside of {operation}, expected one call at a time; make the call after {operation} has "
            "returned, and not in its functions, in hooks of the model, or in a signal handler"
        )
    return (
        "another call on this process group is under way in this process, expected one at a time; call from one thread"
    )


class PhaseEnd:
    """Ends the innermost phase of a call, as its block ends. The phase began in :meth:`Call.phase`."""

    __slots__ = ("_open", "_seconds")

    def __init__(self, call: Call) -> None:
        self._open = call.open_phases
        self._seconds = call.seconds

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        name, start, profiler = self._open.pop()
        if profiler is not None:
            profiler.__exit__(None, None, None)
        self._seconds[name] = self._seconds.get(name, 0.0) + perf_counter() - start


def check_can_communicate(call: Call) -> None:
    """Raise a LegacyDDPError inside backward, or while a graph of the device is captured: no collective may run."""
    if internals.inside_backward():
        raise LegacyDDPError(
            f"{call.operation} was called from inside backward, expected after it; move it behind loss.backward()"
        )
    if devices.is_capturing():
        raise LegacyDDPError(f"{call.operation} was called while a graph is captured; end the capture before it")
