"""What one set of parameters keeps from call to call."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from legacy_ddp import _torch as internals
from legacy_ddp._agreement.agree import Agreement, describe_uneven_work
from legacy_ddp._buckets.plan import Plan, Planner
from legacy_ddp._collectives.observers import Observer
from legacy_ddp._compare import name_ranks
from legacy_ddp._errors import LegacyDDPError
from legacy_ddp._log import warn
from legacy_ddp._record import SyncRecord
from legacy_ddp._replicas.history import StepHistory
from legacy_ddp._reproducible.micro_batches import Leaves
from legacy_ddp._settings import Settings
from legacy_ddp._statistics import SUSPICIOUS_CALLS, comparable_norm
from legacy_ddp._step_guard.backward_counter import StepPolicy
from legacy_ddp._step_guard.guard import guard_steps
from legacy_ddp._transport.call import Call, Seat
from legacy_ddp._transport.groups import groups_of
from legacy_ddp._transport.operation import Operation

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Listener = Callable[[SyncRecord], object]


class Synchronizer:
    """Its plan, its seat in every group it was used with, and what it has warned of."""

    def __init__(self, settings: Settings, wrapper: nn.Module | None = None) -> None:
        self.settings = settings
        self.planner = Planner(settings)
        self.leaves = Leaves(self.planner.counter) if settings.reproducible else None
        self.observers: list[Observer] = []
        self._listeners: OrderedDict[int, Listener] = OrderedDict()  # as RemovableHandle wants it
        self._is_telling = False
        self.history: StepHistory | None = None
        if settings.checks.compares_replicas and wrapper is not None:
            self.history = StepHistory(wrapper, settings, self.policy)
        if settings.checks.guards_steps:
            guard_steps()
        # By the user's group, so that coming back to one finds the seat there again.
        self._seats: weakref.WeakKeyDictionary[dist.ProcessGroup, Seat] = weakref.WeakKeyDictionary()
        self._warned_uneven = False
        self._warned_same_data = False
        self._warned_joined = False
        self._warnings: list[tuple[int, str]] = []  # and the rank that each is shown on

    @property
    def policy(self) -> StepPolicy:
        """Whether calls happen at all, and how a step without one is judged."""
        return self.planner.counter.policy

    def use(self, settings: Settings) -> None:
        """Go on with these, from the next call on."""
        self.settings = settings
        self.planner.use(settings)

    def call(self, operation: Operation, group: dist.ProcessGroup) -> Call:
        """The next call on ``group``. Collective if this process makes its first one there.

        Raises:
            LegacyDDPError: called by one who is being told of a call.
        """
        if self._is_telling:
            raise LegacyDDPError(
                f"{operation} was called inside an on_sync() callback of the same model, which would call it again; "
                "call it after all_reduce() has returned"
            )
        seconds = self.settings.timeout_seconds
        timeout = internals.group_timeout(group) if seconds is None else timedelta(seconds=seconds)
        groups = groups_of(group, timeout)
        if group not in self._seats:
            self._seats[group] = Seat(groups)
        return Call(self._seats[group], operation, timeout, self.settings.checks)

    def note_new_parameters(self, plan: Plan) -> None:
        """A call gave this rank other parameters: that is no step."""
        self.planner.counter.note_written(plan.parameters)
        if self.history is not None:
            self.history.restart()

    def forget_step(self) -> None:
        """What was accumulated since the last call is gone."""
        self.planner.counter.reset()
        if self.leaves is not None:
            self.leaves.end_step()

    def listen(self, listener: Listener) -> RemovableHandle:
        """Tell it of every call from now on.

        Raises:
            TypeError: it is not callable.
        """
        if not callable(listener):
            raise TypeError(f"callback is not callable: got {listener!r}, expected callback(record)")
        handle = RemovableHandle(self._listeners)
        self._listeners[handle.id] = listener
        return handle

    def tell(self, record: SyncRecord) -> None:
        """What a call did, to all who listen."""
        self._is_telling = True
        try:
            for listener in list(self._listeners.values()):
                listener(record)
        finally:
            self._is_telling = False

    def note_uneven(self, call: Call, agreement: Agreement) -> None:
        """Prepare the warning, once per run and on rank 0, if ranks bring different numbers of micro-batches to a plain
        mean. With ``sample_size`` every item counts the same, however a rank cuts its items into micro-batches."""
        if self._warned_uneven or self.settings.checks.uneven != "warn" or agreement.sample_size is not None:
            return
        if finding := describe_uneven_work(agreement.rows):
            self._warned_uneven = True
            if call.groups.rank == 0:
                self.note(
                    call,
                    f"{call}: ranks bring uneven work (said once):\n{finding}\n"
                    "pass all_reduce(sample_size=...) if they should, or see legacy_ddp.Checks(uneven=...)",
                )

    def note_same_data(self, call: Call, agreement: Agreement) -> None:
        """Prepare the warning, once per run and on rank 0, if ranks look as if they read the same data."""
        if self._warned_same_data or call.groups.rank != 0 or not self.settings.checks.warns_of_same_data:
            return
        # Without a backward since the last call gradients are what that one left, equal everywhere.
        norms = [comparable_norm(row.local_norm, row.finite) if row.micro_batches else None for row in agreement.rows]
        if groups := call.seat.lookalikes.note(norms):
            self._warned_same_data = True
            who = ", and ".join(f"{name_ranks(ranks)} hold identical local gradients" for ranks in groups)
            self.note(
                call,
                f"{call}: {who} for {SUSPICIOUS_CALLS} calls (norms equal to the last bit; said once):\n"
                "they probably read the same data (same sampler seed, no DistributedSampler, ...)\n"
                "see legacy_ddp.Checks(same_data=...)",
            )

    def note_joined(self, call: Call, agreement: Agreement) -> None:
        """Prepare the warning, once per run and on rank 0, if several backward passes were added as one leaf."""
        if self._warned_joined or call.groups.rank != 0 or self.settings.checks.level == "off":
            return
        joined = {rank: row for rank, row in enumerate(agreement.rows) if 0 < row.leaves < row.micro_batches}
        if joined:
            self._warned_joined = True
            row = next(iter(joined.values()))
            self.note(
                call,
                f"{call}: {name_ranks(joined)} ran several backward passes in one micro-batch (said once):\n"
                f"got {row.micro_batches} in {row.leaves}; put each micro-batch into a no_sync() block of its own,\n"
                "or another split of them over ranks gives other bits",
            )

    def note(self, call: Call, warning: str) -> None:
        """Keep a warning, if there is one, for the end of the call."""
        if warning:
            self._warnings.append((call.groups.rank, warning))

    def emit_warning(self) -> None:
        """Say what there is to say, at the line that called our caller."""
        while self._warnings:
            warn(*self._warnings.pop(0), stacklevel=3)
