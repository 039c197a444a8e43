"""State of a set of parameters between calls: the synchronizer of a wrapper, a module, or a list of parameters."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Any, Generic, NamedTuple, Never, ParamSpec

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from legacy_ddp import _torch as internals
from legacy_ddp._call.check import Subject, Warnings
from legacy_ddp._call.check_list import make_checks
from legacy_ddp._call.replicas import Replicas
from legacy_ddp._call.transport_choice import Transport
from legacy_ddp._check_settings import Checks
from legacy_ddp._errors import LegacyDDPError, argument_errors
from legacy_ddp._interrupts import undone_by
from legacy_ddp._log import warn
from legacy_ddp._memory.plan import Columns, Plan, Planner
from legacy_ddp._ranks.agree import Agreement
from legacy_ddp._ranks.call import Call, GroupState
from legacy_ddp._ranks.header import Flag, Operation
from legacy_ddp._ranks.private_groups import groups_of, inherited, refuse_inherited
from legacy_ddp._record import NoMetrics, SyncRecord
from legacy_ddp._replicas.history import ReplicaDigests
from legacy_ddp._reproducible import Leaves
from legacy_ddp._settings import Settings, resolve_checks, resolve_timeout, resolve_transport
from legacy_ddp._steps.backward_counter import PassiveHook
from legacy_ddp._steps.guard import guard_steps
from legacy_ddp._steps.policy import StepPolicy
from legacy_ddp._steps.step_counter import watch_steps
from legacy_ddp._text import printable

_UNGUARDED = Checks(unsynchronized_step="allow")  # all_reduce_gradients() has no no_sync() for a local step
# For all threads: the backward pass of a CUDA model runs in threads of its own.
_private_blocks: dict[object, None] = {}
P = ParamSpec("P")


class Event(OrderedDict[int, Callable[P, object]], Generic[P]):
    """The callbacks of an event, by the id of the handle."""

    @argument_errors
    def add(self, callback: Callable[P, object]) -> RemovableHandle:
        """Call ``callback`` at every event from now on, until the handle's ``remove()``.

        Raises:
            TypeError: ``callback`` is not callable.
        """
        if not callable(callback):
            raise TypeError(f"callback is not callable: got {callback!r}, expected callback(record)")
        handle = RemovableHandle(self)
        self[handle.id] = callback
        return handle

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for callback in tuple(self.values()):
            callback(*args, **kwargs)


class Observers:
    """The events of a wrapper or module. An event without callbacks is false: a call tests this before it notifies."""

    def __init__(self) -> None:
        # A forward pass of the wrapper begins, not inside compiled code: callback(args, kwargs).
        self.forward: Event[[tuple[Any, ...], Mapping[str, Any]]] = Event()
        # A call begins, outside of the modes of torch that a call sets: callback(). No exception.
        self.called: Event[[]] = Event()
        # Local gradients by name, before the exchange: callback(grads). An exception ends the call on all ranks.
        self.local: Event[[Mapping[str, torch.Tensor | None]]] = Event()
        # A call succeeded, also a call of a rank that has left join(): callback(record).
        self.reduced: Event[[SyncRecord]] = Event()
        # all_reduce(), or all_reduce_gradients(), is about to return: callback(record). An exception leaves the call.
        self.returned: Event[[SyncRecord]] = Event()


@contextmanager
def private_forwards() -> Iterator[None]:
    """In the block, forward passes, operations and ``no_sync()`` blocks are not counted as parts of the user's step."""
    block = object()
    with undone_by(partial(_private_blocks.pop, block, None)):
        _private_blocks[block] = None
        yield


def are_forwards_private() -> bool:
    return bool(_private_blocks)


class _OnGroup(NamedTuple):
    state: GroupState
    transport: Transport


class Synchronizer:
    """The plan, the counters per process group, the observers and the warnings of a set of parameters.

    ``module``: None for parameters without a module.
    """

    def __init__(
        self, settings: Settings, wrapper: nn.Module | None = None, *, module: nn.Module | None = None
    ) -> None:
        self.settings = settings
        self.module_class = "" if module is None else printable(type(internals.inside_of_compiled(module)).__name__)
        self.planner = Planner(settings, module)
        self.policy: StepPolicy = self.planner.counter.policy  # no_sync() blocks, and a step without a call
        self.policy.module_class = self.module_class
        self.leaves = Leaves(self.planner.counter, self.planner.segments) if settings.reproducible else None
        self.observers = Observers()
        self.warnings = Warnings()
        self.checks = make_checks(Subject(settings, self.planner, wrapper))
        if settings.checks.guards_steps:
            guard_steps()
        if settings.checks.level != "off":
            watch_steps()
        # By the user's group: a wrapper that returns to an earlier group continues with its counters.
        self.on_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _OnGroup] = weakref.WeakKeyDictionary()
        self._is_notifying = False

    @property
    def digests(self) -> ReplicaDigests | None:
        """The digests of the replica, None if replicas are not compared."""
        return next((check.digests for check in self.checks.all if isinstance(check, Replicas)), None)

    def use(self, settings: Settings) -> None:
        self.planner.change_settings(settings)
        self.settings = settings

    def call(self, operation: Operation, group: dist.ProcessGroup) -> Call:
        """The next call on ``group``. Collective in the first call of this process on ``group``."""
        if self._is_notifying:
            raise LegacyDDPError(
                f"{operation} was called inside an on_sync() callback of the same model, which would call it again; "
                "call it after all_reduce() has returned"
            )
        if inherited:
            refuse_inherited(group, operation)
        found = self.on_groups.get(group)
        if found is None:
            is_function = self.settings.by_environment
            checks = self.settings.checks
            groups = groups_of(
                group,
                self.settings.timeout_seconds,
                for_wrapper=not is_function,
                warn_after_seconds=None if checks.level == "off" else checks.warn_after_seconds,
            )
            transport = Transport(groups, self.planner, self.leaves, self.warnings)
            found = self.on_groups[group] = _OnGroup(GroupState(groups), transport)
        return Call(found.state, operation, self.settings, self.module_class)

    def transport_on(self, group: dist.ProcessGroup) -> Transport | None:
        """The transport on ``group``; None before the first call."""
        found = self.on_groups.get(group)
        return None if found is None else found.transport

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_training: bool) -> None:
        """Local: a forward of the wrapper begins. Has no effect on the forward."""
        if _private_blocks:
            return
        if torch.is_grad_enabled():
            self.policy.passes.forwards += 1
        if self.leaves is not None and self.policy.sync_enabled:
            self.leaves.drop_if_cleared()
        for check in self.checks.with_forward:
            check.begin_forward(is_training=is_training)
        if self.observers.forward:
            self.observers.forward.notify(args, kwargs)

    def idle_call(self, group: dist.ProcessGroup) -> SyncRecord:
        """Local: the record of a call inside no_sync(), which does nothing."""
        self.policy.idle_calls += 1
        for check in self.checks.with_idle_call:
            if check.is_on and (text := check.idle_call()):
                warn(dist.get_rank(group), text, check.section, is_everywhere=True)
        return SyncRecord(call=0, synchronized=False, metrics=NoMetrics())

    def end_call(self, record: SyncRecord) -> SyncRecord:
        """Show the warnings of a call, and call the ``on_sync()`` callbacks. Returns ``record``."""
        if self.warnings.pending:
            self.warnings.emit()
        if self.observers.returned:
            with undone_by(partial(setattr, self, "_is_notifying", False)):
                self._is_notifying = True
                self.observers.returned.notify(record)
        return record

    def flush(self, call: Call, agreement: Agreement) -> None:
        """If all ranks have the flag of ``late.flush_flag()`` in their headers, wait for the devices, and add the
        warning about earlier calls, which the caller shows. Collective with the flag."""
        if agreement.common_flags & Flag.WATCHED and (text := self.checks.late.flush(call)):
            self.warnings.add(call, text, self.checks.late.section, is_everywhere=True)

    def note_new_parameters(self, plan: Plan) -> None:
        """Note a broadcast of the parameters. It does not count as a step."""
        self.planner.counter.ignore_earlier_writes(plan.parameters)
        for check in self.checks.all:
            check.restart()

    def note_new_buffers(self) -> None:
        for check in self.checks.all:
            check.restart_buffers()

    def forget_step(self) -> None:
        """Forget the counts and the micro-batches since the last call."""
        self.planner.counter.reset()
        for check in self.checks.all:
            check.forget()
        if self.leaves is not None:
            self.leaves.end_step()


def synchronizer_of(module_or_params: nn.Module | Iterable[torch.Tensor]) -> tuple[Synchronizer, Callable[[], Columns]]:
    """The synchronizer of a module or of parameters, and a function that returns the parameters with their names.

    The synchronizer lives as long as the module, or the first of the parameters. A wrong argument raises its error in
    this function: a call runs it and announces the error to the other ranks. Without a process group the error is
    raised at once.
    """
    try:
        if isinstance(module_or_params, nn.Module):
            synchronizer = _of_modules.get(module_or_params)
            if synchronizer is None:
                synchronizer = _of_modules[module_or_params] = _new(module_or_params)
            return synchronizer, partial(synchronizer.planner.walk.columns, module_or_params)
        parameters = _tensors(module_or_params)
        return _of_parameters(parameters), lambda: Columns(_numbers(len(parameters)), parameters)
    except (TypeError, ValueError) as error:
        if not dist.is_initialized():
            raise
        return Synchronizer(Settings(checks=_UNGUARDED, by_environment=True)), partial(_raise, error)


_of_modules: MutableMapping[nn.Module, Synchronizer] = internals.WeakIdKeyDictionary()


def _new(module: nn.Module | None = None) -> Synchronizer:
    settings = Settings(
        transport=resolve_transport("auto"),
        checks=resolve_checks(_UNGUARDED),
        timeout_seconds=resolve_timeout(None),
        by_environment=True,
    )
    return Synchronizer(settings, module=module)


@cache
def _of_nothing() -> Synchronizer:
    return _new()


class _SynchronizerHook(PassiveHook):
    """A hook without effect, which keeps a synchronizer for as long as the parameter lives."""

    # A weak dictionary is not usable: torch refuses to swap the contents of a tensor that has weak references.

    def __init__(self) -> None:
        self.synchronizer = _new()

    def __call__(self, parameter: torch.Tensor) -> None:
        pass


def _of_parameters(parameters: Sequence[torch.Tensor]) -> Synchronizer:
    if not parameters:
        return _of_nothing()
    (hooks,) = internals.accumulate_hooks(parameters[:1])
    hook = next((hook for hook in hooks.values() if isinstance(hook, _SynchronizerHook)), None)
    if hook is None:
        hook = _SynchronizerHook()
        if parameters[0].is_leaf:  # the call refuses a tensor that is no leaf
            internals.add_accumulate_hook(parameters[0], hook)
    return hook.synchronizer


def _tensors(given: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    is_single = isinstance(given, torch.Tensor) or not isinstance(given, Iterable)  # a tensor is iterable, too
    parameters: list[Any] = [given] if is_single else list(given)
    others = [type(parameter).__name__ for parameter in parameters if not isinstance(parameter, torch.Tensor)]
    if others:
        found = others[0] if is_single else f"{type(given).__name__} with {others[0]}"
        raise TypeError(f"module_or_params is unusable: got {found}, expected a module or its parameters (tensors)")
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            f"module_or_params has nothing to train: got {len(parameters)} tensors without requires_grad, such as "
            "gradients, expected parameters; pass the module, or list(module.parameters())"
        )
    return parameters


@lru_cache(maxsize=4)
def _numbers(count: int) -> list[str]:
    return [f"{index:06d}" for index in range(count)]


def _raise(error: Exception) -> Never:
    raise error
