"""Optimizer steps of the process: their observers, their number between two calls, and the GradScaler of each."""

import weakref
from functools import cache
from typing import Any

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._steps.backward_counter import BackwardHook, note_uses
from legacy_ddp._steps.policy import StepPolicy
from legacy_ddp._torch import device as devices


class StepObserver:
    """Sees the outermost steps of all optimizers with a parameter in :attr:`ids`, outside of ``no_sync()``.

    A step inside a step, as of a sharded optimizer, is ignored. Subclasses extend the three methods.
    """

    def __init__(self, policy: StepPolicy) -> None:
        self.policy = policy
        self.ids: frozenset[int] = frozenset()
        self._open: weakref.ref[torch.optim.Optimizer] | None = None  # the step that has begun and not ended
        self._has_closure = False  # of the open step
        _observers.append(weakref.ref(self, _observers.remove))
        watch_steps()

    def begin_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """An outermost step begins. A closure computes the gradients later."""

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An outermost step has ended. Not called for a step with an error."""

    def count_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of an optimizer without these parameters has ended: of a second model, or of replaced parameters."""

    def covers(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` steps any parameter in :attr:`ids`. False in ``no_sync()``: steps are local."""
        if not self.policy.sync_enabled:
            return False
        for group in optimizer.param_groups:
            for parameter in group["params"]:  # mostly the first is one of them: a generator would cost more
                if id(parameter) in self.ids:
                    return True
        return False

    def forget_failed_step(self) -> None:
        """A step that is still open when a call begins has failed, unless the call runs inside its closure."""
        if not self._has_closure:
            self._open = None

    def _before_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        if self._open is None or self._open() in (None, optimizer):
            self._open, self._has_closure = weakref.ref(optimizer), has_closure
            self.begin_step(optimizer, has_closure=has_closure)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._open is not None and self._open() is optimizer:
            self._open = None
            self.end_step(optimizer)

    def _after_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._open is None and self.policy.sync_enabled:
            self.count_other_step(optimizer)


_observers: list[weakref.ref[StepObserver]] = []  # a WeakSet takes longer to walk through
# Of each optimizer the scaler of its last step. Weak references: neither stays alive here.
last_scalers: "weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[torch.amp.GradScaler]]" = (
    weakref.WeakKeyDictionary()
)
_known: "weakref.WeakValueDictionary[int, torch.amp.GradScaler]" = weakref.WeakValueDictionary()  # by id: any class


@cache
def watch_steps() -> None:
    """See every step in this process from now on: for observers, the scaler of each optimizer, and the use of results.
    Later calls do nothing."""
    internals.before_every_step(_before_step)  # after the pre-hooks of the optimizer: a pre-hook may make the call
    internals.after_every_step(_after_step)


@internals.keeps_grad_mode
def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    scaler = internals.calling_scaler()
    if scaler is not None:
        last_scalers[optimizer] = weakref.ref(scaler)
        _known[id(scaler)] = scaler
    has_closure = any(map(callable, (*args[1:], *kwargs.values())))
    for reference in tuple(_observers):
        observer = reference()
        if observer is not None and observer.covers(optimizer):
            observer._before_step(optimizer, has_closure=has_closure)


@internals.keeps_grad_mode
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for reference in tuple(_observers):
        observer = reference()
        if observer is None:
            continue
        if observer.covers(optimizer):
            observer._after_step(optimizer)
        else:
            observer._after_other_step(optimizer)
    note_uses(optimizer)


class StepCounter(StepObserver):
    """Counts completed steps with a nonzero gradient of the given parameters, from a successful call to the next call.

    A step with zeros only does not count: tools make such steps to create optimizer state. Gradients on a device are
    not read in the first step of an optimizer, because the host would wait: the step counts if a gradient is the result
    of a call, or was reached by a backward since. The zeros of a tool are neither. Later steps of this optimizer may
    find zeros that ``zero_grad(set_to_none=False)`` has left; their gradients are read in the call.
    """

    def __init__(self, policy: StepPolicy) -> None:
        super().__init__(policy)
        # The group of the call from which on steps are counted. Weak: a destroyed group must not live on here.
        self._place: weakref.ref[object] | None = None
        self._steps = 0
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # with gradients on a device
        self._reader = devices.Reader()

    def take(self, place: object) -> int | None:
        """The number of steps since the last call, or None if the number is unknown, and stop counting.

        The number is known if the last call succeeded, and was made at the same ``place``, a process group.
        """
        is_known = self._place is not None and self._place() is place
        self._place = None
        if self._open is not None:
            self.forget_failed_step()
        if not is_known:
            return None
        if self._reader.waiting:
            self._reader.read()
        return self._steps

    def stop(self) -> None:
        """Count no steps until the next successful call."""
        self._place = None

    def begin(self, place: object) -> None:
        """Count from now on, after a successful call."""
        self._steps = 0
        self._stepped.clear()
        if self._reader.waiting:
            self._reader.clear()
        self._place = weakref.ref(place)  # last: with it the steps count

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._place is not None and self._used_gradients(optimizer):
            self._steps += 1

    def _used_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a gradient of the parameters is not zero, as far as the host knows.

        Small gradients are read first: the first is mostly enough.
        """
        away = []
        large = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None or id(parameter) not in self.ids:
                    continue
                if grad.device.type != "cpu":
                    if _is_of_training(parameter):
                        if optimizer not in self._stepped or devices.is_capturing():
                            self._stepped.add(optimizer)
                            return True
                        away.append(devices.values_of(grad).any().view(1))
                    continue
                grad = devices.values_of(grad)
                if grad.numel() > devices.QUICK_NUMEL:
                    large.append(grad)
                elif devices.has_nonzero(grad):
                    return True
        if any(map(devices.has_nonzero, large)):
            return True
        self._reader.add(away, self._count_if_any)
        return False

    def _count_if_any(self, numbers: list[list[bool]]) -> None:
        self._steps += any(map(any, numbers))


def _is_of_training(parameter: torch.Tensor) -> bool:
    """Whether a call left the gradient, or a backward has reached it since."""
    (hooks,) = internals.accumulate_hooks([parameter])
    return any(
        hook.counts[hook.index] > 0 or hook.was_reduced(parameter.grad)
        for hook in hooks.values()
        if type(hook) is BackwardHook
    )


def used_scaler(*, search: bool) -> torch.amp.GradScaler | None:
    """The GradScaler that has scaled a loss; of several the one with the largest scale.

    Of the scalers that have stepped an optimizer, or with ``search`` of all scalers in this process: an overflow may
    come before the first step, and then the scaler skips it. A search finds scalers for all later calls, too.
    """
    if search:
        _known.update({id(scaler): scaler for scaler in internals.all_scalers()})
    return internals.largest_used_scaler(list(_known.values()))


def knows_scalers() -> bool:
    """Whether a scaler has stepped an optimizer, or was found by a search. Reads no scale."""
    return bool(_known)


def unscaled_ids() -> set[int]:
    """The ids of all parameters with a gradient that a scaler has unscaled before a step that has not come yet.

    An optimizer is known from its second step on.
    """
    ids: set[int] = set()
    for reference in last_scalers.keyrefs():  # a list: a step in another thread may add an optimizer meanwhile
        optimizer = reference()
        scaler = None if optimizer is None else last_scalers[optimizer]()
        if optimizer is not None and scaler is not None and internals.has_unscaled(scaler, optimizer):
            ids.update(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return ids
