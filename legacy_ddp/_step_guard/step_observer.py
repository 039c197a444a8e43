"""Observers of optimizer steps: which steps begin and end, of all optimizers of the process."""

import weakref
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from legacy_ddp import _torch as internals
from legacy_ddp._step_guard.policy import StepPolicy


class StepObserver:
    """Sees the outermost steps of all optimizers with a parameter in :attr:`ids`, outside of ``no_sync()``.

    A step inside a step, as of a sharded optimizer, is ignored. Subclasses extend the three methods.
    """

    def __init__(self, policy: StepPolicy) -> None:
        self.policy = policy
        self.ids: frozenset[int] = frozenset()
        self._open: weakref.ref[torch.optim.Optimizer] | None = None  # the step that has begun and not ended
        self._has_closure = False  # of the open step
        _observers.add(self)
        _register_step_hooks()

    def begin_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """An outermost step begins. A closure computes the gradients later."""

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An outermost step has ended. Not called for a step with an error."""

    def count_other_step(self) -> None:
        """A step of an optimizer without these parameters has ended: of a second model, or of replaced parameters."""

    def covers(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` steps any parameter in :attr:`ids`. False in ``no_sync()``: steps are local."""
        return self.policy.sync_enabled and any(
            id(parameter) in self.ids for group in optimizer.param_groups for parameter in group["params"]
        )

    def forget_failed_step(self) -> None:
        """In a call: a step still open has raised an error, unless its closure makes this call."""
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

    def _after_other_step(self) -> None:
        if self._open is None and self.policy.sync_enabled:
            self.count_other_step()


_observers: "weakref.WeakSet[StepObserver]" = weakref.WeakSet()


@cache
def _register_step_hooks() -> None:
    internals.before_every_step(_before_step)  # after the pre-hooks of the optimizer: a pre-hook may make the call
    register_optimizer_step_post_hook(_after_step)


@internals.disable_dynamo
def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    has_closure = any(callable(argument) for argument in (*args[1:], *kwargs.values()))
    with torch.no_grad():
        for observer in list(_observers):
            if observer.covers(optimizer):
                observer._before_step(optimizer, has_closure=has_closure)


@internals.disable_dynamo
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for observer in list(_observers):
            if observer.covers(optimizer):
                observer._after_step(optimizer)
            else:
                observer._after_other_step()
