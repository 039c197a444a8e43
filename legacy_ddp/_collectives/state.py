"""State of a set of parameters between calls."""

import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.plan import Plan, Planner
from legacy_ddp._collectives.check import Subject
from legacy_ddp._collectives.checks import make_checks
from legacy_ddp._collectives.evaluation_hint import EvaluationHint
from legacy_ddp._collectives.observers import Observers, are_forwards_private
from legacy_ddp._collectives.replicas import Replicas
from legacy_ddp._collectives.transport_choice import Transport
from legacy_ddp._collectives.warn_once import Warnings
from legacy_ddp._errors import LegacyDDPError
from legacy_ddp._record import SyncRecord
from legacy_ddp._replicas.compare import ReplicaDigests
from legacy_ddp._reproducible.micro_batches import Leaves
from legacy_ddp._settings import Settings
from legacy_ddp._step_guard.backward_counter import StepPolicy, watch_uses
from legacy_ddp._step_guard.guard import guard_steps
from legacy_ddp._transport.call import Call, GroupState
from legacy_ddp._transport.groups import groups_of, refuse_inherited
from legacy_ddp._transport.rows import Operation


class Synchronizer:
    """Plan, counters per process group, observers and warnings of a set of parameters."""

    def __init__(self, settings: Settings, wrapper: nn.Module | None = None, *, module_class: str = "") -> None:
        self.settings = settings
        self.module_class = module_class  # empty for parameters without a module
        self.planner = Planner(settings)
        self.leaves = Leaves(self.planner.counter, self.planner.segments) if settings.reproducible else None
        self.observers = Observers()
        self.warnings = Warnings()
        self.checks = make_checks(Subject(settings, self.planner, wrapper))
        self.evaluation_hint: EvaluationHint | None = None
        if settings.checks.level != "off" and wrapper is not None:
            self.evaluation_hint = EvaluationHint(wrapper, settings)
        if settings.checks.guards_steps:
            guard_steps()
        if settings.checks.level != "off":
            watch_uses()
        # By the user's group: a wrapper that comes back to a group finds its counters there.
        self._group_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()
        self._transports: weakref.WeakKeyDictionary[dist.ProcessGroup, Transport] = weakref.WeakKeyDictionary()
        self._is_notifying = False

    @property
    def digests(self) -> ReplicaDigests | None:
        """The digests of the replica, None if replicas are not compared."""
        return next((check.digests for check in self.checks.all if isinstance(check, Replicas)), None)

    @property
    def policy(self) -> StepPolicy:
        """Whether calls do anything (``no_sync()``), and whether a step without a call is an error."""
        return self.planner.counter.policy

    def use(self, settings: Settings) -> None:
        """Use other settings from the next call on."""
        self.settings = settings
        self.planner.change_settings(settings)

    def call(self, operation: Operation, group: dist.ProcessGroup) -> Call:
        """The next call on ``group``. Collective in the first call of this process on ``group``.

        Raises:
            LegacyDDPError: called inside an ``on_sync()`` callback of the same parameters, or in a forked child.
        """
        if self._is_notifying:
            raise LegacyDDPError(
                f"{operation} was called inside an on_sync() callback of the same model, which would call it again; "
                "call it after all_reduce() has returned"
            )
        refuse_inherited(group, operation)
        seconds = self.settings.timeout_seconds
        timeout = internals.group_timeout(group) if seconds is None else timedelta(seconds=seconds)
        state = self._group_states.get(group)
        if state is None:
            state = self._group_states[group] = GroupState(groups_of(group, timeout))
            self._transports[group] = Transport(state.groups, self.planner, self.leaves, self.warnings)
        return Call(state, operation, timeout, self.settings, self.module_class)

    def transport(self, group: dist.ProcessGroup) -> Transport:
        """The transport of gradients on ``group``, after :meth:`call`."""
        return self._transports[group]

    def transport_text(self, group: dist.ProcessGroup) -> str:
        """The transport of dense gradients on ``group``, for a reader; empty before the first call."""
        transport = self._transports.get(group)
        return "" if transport is None else transport.text

    def expected_transport(self, group: dist.ProcessGroup) -> str:
        """The transport of the next call on ``group``, as far as it is known; empty for a single rank."""
        transport = self._transports.get(group)
        return "" if transport is None else transport.expected_text

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_training: bool) -> None:
        """A forward of the wrapper begins: local, and without effect on the forward."""
        if are_forwards_private():
            return
        if self.leaves is not None and self.policy.sync_enabled:
            self.leaves.drop_if_cleared()
        for check in self.checks.with_forward:
            check.begin_forward(is_training=is_training)
        hint = self.evaluation_hint
        if hint is not None and hint.awaits_training is is_training and hint.begin_awaited(self._group_states.values()):
            self.evaluation_hint = None
        if self.observers.forward:
            self.observers.forward.notify(args, kwargs)

    def end_call(self, record: SyncRecord) -> SyncRecord:
        """The end of a call for the caller: show the warnings, and call the ``on_sync()`` callbacks."""
        if self.warnings.pending:
            self.warnings.emit()
        if self.observers.returned:
            self._is_notifying = True
            try:
                self.observers.returned.notify(record)
            finally:
                self._is_notifying = False
        return record

    def note_new_parameters(self, plan: Plan) -> None:
        """Note a broadcast of the parameters, which does not count as a step."""
        self.planner.counter.ignore_earlier_writes(plan.parameters)
        for check in self.checks.all:
            check.restart()

    def note_new_buffers(self, module: nn.Module) -> None:
        """Note that all ranks hold equal buffers, or should: at construction and after a broadcast."""
        if self.digests is not None:
            with torch.no_grad():
                self.digests.buffers.mark(module)
        if self.evaluation_hint is not None:
            self.evaluation_hint.restart()

    def forget_step(self) -> None:
        """Forget the counts and the micro-batches since the last call."""
        self.planner.counter.reset()
        for check in self.checks.all:
            check.forget()
        if self.leaves is not None:
            self.leaves.end_step()
