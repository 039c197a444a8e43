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
from legacy_ddp._collectives.edited import EditedGradients
from legacy_ddp._collectives.evaluation_hint import EvaluationHint
from legacy_ddp._collectives.observers import Observers, are_forwards_private
from legacy_ddp._collectives.transport_choice import Transport
from legacy_ddp._collectives.warn_once import Warnings
from legacy_ddp._errors import LegacyDDPError
from legacy_ddp._record import SyncRecord
from legacy_ddp._replicas.check import ReplicaDigests
from legacy_ddp._replicas.history import StepHistory
from legacy_ddp._replicas.periodic import PeriodicDigests
from legacy_ddp._replicas.rotation import RotatingDigests
from legacy_ddp._reproducible.micro_batches import Leaves
from legacy_ddp._settings import Settings
from legacy_ddp._step_guard.guard import guard_steps
from legacy_ddp._step_guard.policy import StepPolicy
from legacy_ddp._step_guard.step_counter import StepCounter
from legacy_ddp._step_guard.unscaled import watch_scalers
from legacy_ddp._transport.call import Call, GroupState
from legacy_ddp._transport.groups import groups_of, refuse_inherited
from legacy_ddp._transport.operation import Operation


class Synchronizer:
    """Plan, counters per process group, observers and warnings of a set of parameters."""

    def __init__(self, settings: Settings, wrapper: nn.Module | None = None, *, module_class: str = "") -> None:
        self.settings = settings
        self.module_class = module_class  # empty for parameters without a module
        self.planner = Planner(settings)
        self.leaves = Leaves(self.planner.counter, self.planner.segments) if settings.reproducible else None
        self.observers = Observers()
        self.warnings = Warnings(settings)
        self.edits = EditedGradients(settings.checks)
        self.digests: ReplicaDigests | None = None
        if settings.checks.compares_replicas and wrapper is not None:
            kind = StepHistory if settings.checks.every == 1 else PeriodicDigests
            self.digests = kind(wrapper, settings, self.policy)
        elif settings.checks.rotates_digests and wrapper is not None:
            self.digests = RotatingDigests(wrapper, settings, self.planner)
        self.evaluation_hint: EvaluationHint | None = None
        if settings.checks.level != "off" and wrapper is not None:
            self.evaluation_hint = EvaluationHint(wrapper, settings)
        if settings.checks.guards_steps:
            guard_steps()
        if settings.checks.nonfinite_policy != "ignore":
            watch_scalers()
        self.steps = StepCounter(self.policy) if settings.checks.counts_steps and wrapper is not None else None
        # By the user's group: a wrapper that comes back to a group finds its counters there.
        self._group_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()
        self._transports: weakref.WeakKeyDictionary[dist.ProcessGroup, Transport] = weakref.WeakKeyDictionary()
        self._is_notifying = False

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
        groups = groups_of(group, timeout)
        if group not in self._group_states:
            self._group_states[group] = GroupState(groups)
            self._transports[group] = Transport(groups, self.planner, self.leaves, self.warnings)
        return Call(self._group_states[group], operation, timeout, self.settings, self.module_class)

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
        # A traced forward would record the operations of the digest.
        if self.digests is not None and torch.is_grad_enabled() and not internals.is_tracing():
            self.digests.begin_forward(is_training=is_training)
        hint = self.evaluation_hint
        if hint is not None and hint.awaits_training is is_training and hint.begin_awaited(self._group_states.values()):
            self.evaluation_hint = None
        if self.observers.forward:
            self.observers.forward.notify(args, kwargs)

    def notify_returned(self, record: SyncRecord) -> None:
        """Call the ``on_sync()`` callbacks."""
        self._is_notifying = True
        try:
            self.observers.returned.notify(record)
        finally:
            self._is_notifying = False

    def note_new_parameters(self, plan: Plan) -> None:
        """Note a broadcast of the parameters, which does not count as a step."""
        self.planner.counter.ignore_earlier_writes(plan.parameters)
        if self.digests is not None:
            self.digests.restart()

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
        if self.steps is not None:
            self.steps.stop()
        if self.leaves is not None:
            self.leaves.end_step()
