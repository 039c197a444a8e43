"""What one set of parameters keeps from call to call."""

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from legacy_ddp import _torch_internals as internals
from legacy_ddp._agree import Agreement, describe_micro_batches
from legacy_ddp._call import Call, Seat
from legacy_ddp._compare import name_ranks
from legacy_ddp._counting import StepPolicy
from legacy_ddp._errors import LegacyDDPError
from legacy_ddp._figures import SUSPICIOUS_CALLS, comparable_norm
from legacy_ddp._groups import groups_of
from legacy_ddp._guard import guard_steps
from legacy_ddp._header import Operation
from legacy_ddp._leaves import Leaves
from legacy_ddp._observe import Observer
from legacy_ddp._plan import Plan, Planner
from legacy_ddp._record import SyncRecord
from legacy_ddp._replicas.trail import Trail
from legacy_ddp._settings import Checks, Settings, resolve_checks

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
        self.trail: Trail | None = None
        if settings.checks.compares_replicas and wrapper is not None:
            self.trail = Trail(wrapper, settings, self.policy)
        if settings.checks.guards_steps:
            guard_steps()
        # By the user's group, so that coming back to one finds the seat there again.
        self._seats: weakref.WeakKeyDictionary[dist.ProcessGroup, Seat] = weakref.WeakKeyDictionary()
        self._warned_uneven = False
        self._warned_same_data = False
        self._warned_joined = False
        self._warnings: list[str] = []

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
        if self.trail is not None:
            self.trail.restart()

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
        """Prepare the warning, once per run and on rank 0, if ranks bring different numbers of micro-batches."""
        if self._warned_uneven or self.settings.checks.uneven != "warn":
            return
        if finding := describe_micro_batches(agreement.rows):
            self._warned_uneven = True
            if call.groups.rank == 0:
                self.note(f"{call}: ranks bring uneven work (said once):\n{finding}\nsee legacy_ddp.Checks(uneven=...)")

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
                f"{call}: {who} for {SUSPICIOUS_CALLS} calls (norms equal to the last bit; said once):\n"
                "they probably read the same data (same sampler seed, no DistributedSampler, ...)\n"
                "see legacy_ddp.Checks(same_data=...)"
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
                f"{call}: {name_ranks(joined)} ran several backward passes in one micro-batch (said once):\n"
                f"got {row.micro_batches} in {row.leaves}; put each micro-batch into a no_sync() block of its own,\n"
                "or another split of them over ranks gives other bits"
            )

    def note(self, warning: str) -> None:
        """Keep a warning, if there is one, for the end of the call."""
        if warning:
            self._warnings.append(warning)

    def emit_warning(self) -> None:
        """Say what there is to say, at the line that called our caller."""
        while self._warnings:  # where a warning is an error, the next one follows at the next call
            warnings.warn(self._warnings.pop(0), stacklevel=3)


def remember(module_or_params: nn.Module | Iterable[torch.Tensor]) -> tuple[Synchronizer, NamedTensors]:
    """The synchronizer of a module or of parameters, and their names; it lives as long as that module or the first one.

    What is wrong with the argument shows where the names are looked at: inside the call, so that the other ranks hear
    of it. Without any process group there are no others, and it shows here.
    """
    try:
        key, named = _key_and_names(module_or_params)
        if key not in _remembered:
            _remembered[key] = Synchronizer(Settings(checks=resolve_checks(_UNGUARDED)))
    except (TypeError, ValueError) as problem:
        if not dist.is_initialized():
            raise
        return Synchronizer(Settings(checks=_UNGUARDED)), _raising(problem)
    return _remembered[key], named


_UNGUARDED = Checks(unsynchronized_step="allow")  # a function has no no_sync() to step in
_remembered = internals.WeakIdKeyDictionary()


def _key_and_names(module_or_params: nn.Module | Iterable[torch.Tensor]) -> tuple[object, NamedTensors]:
    if isinstance(module_or_params, nn.Module):
        return module_or_params, list(module_or_params.named_parameters(remove_duplicate=False))
    parameters = list(module_or_params) if isinstance(module_or_params, Iterable) else [module_or_params]
    others = [type(parameter).__name__ for parameter in parameters if not isinstance(parameter, torch.Tensor)]
    if others:
        raise TypeError(f"module_or_params is unusable: got {others[0]}, expected a module or its parameters (tensors)")
    key: object = parameters[0] if parameters else _raising  # or anything else that lives for ever
    return key, [(f"{index:06d}", tensor) for index, tensor in enumerate(parameters)]


def _raising(problem: Exception) -> NamedTensors:
    raise problem
    yield  # type: ignore[unreachable]  # makes it a generator, which raises only when it is looked at
