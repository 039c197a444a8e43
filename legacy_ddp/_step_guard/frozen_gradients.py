"""Gradients of parameters that are frozen in the call: it leaves them out, and a step may use them all the same.

A script thaws a layer, runs backward, and freezes the layer again before the call. The optimizer still holds the layer,
and its ``.grad`` has the gradient of this rank alone. Nothing in the call shows that: the parameters are those of the
call before. So a hook on each frozen parameter notes the gradient that a backward makes, and the guard looks for it in
every step.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from legacy_ddp import _torch as internals
from legacy_ddp._step_guard.backward_counter import BackwardHook, PassiveHook, remove_hooks
from legacy_ddp._step_guard.policy import StepPolicy

with_gradients: "weakref.WeakSet[FrozenHook]" = weakref.WeakSet()  # the hooks that have noted a gradient


class FrozenHook(PassiveHook):
    """On a parameter that is frozen in the plan; called if a backward reaches it, thawed since.

    ``grad``: the identity of the gradient that backward has made and no call has reduced; None without one.
    """

    __slots__ = ("__weakref__", "grad", "name", "policy")

    def __init__(self, name: str, policy: StepPolicy) -> None:
        self.name, self.policy = name, policy
        self.grad: dict[str, Any] | None = None

    def __call__(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and not torch.compiler.is_compiling():
            self.note(internals.identity(parameter.grad))

    def note(self, grad: dict[str, Any]) -> None:
        """The gradient with this identity is of this rank alone."""
        self.grad = grad
        with_gradients.add(self)

    def forget(self) -> None:
        """The gradient is gone, or belongs to a local step."""
        self.grad = None
        with_gradients.discard(self)


class FrozenGradients:
    """The hooks on the frozen parameters of a plan. Keeps no parameter alive."""

    def __init__(self, policy: StepPolicy) -> None:
        self._policy = policy
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, remove_hooks, self._handles)

    def attach(self, frozen: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Look at these parameters from now on, instead of those before. Call this before the counter lets go of
        parameters that were thawed until now: their hooks tell whether the gradient waits for a call."""
        grads = self._waiting(parameter for _, parameter in frozen)
        earlier = list(self._handles)
        for (name, parameter), grad in zip(frozen, grads, strict=True):
            hook = FrozenHook(name, self._policy)
            if grad is not None:
                hook.note(grad)
            internals.add_accumulate_hook(parameter, hook, self._handles)
        # Last: an exception before this leaves the hooks that know their gradients.
        for handle in earlier:
            handle.remove()
        del self._handles[: len(earlier)]

    def _waiting(self, parameters: Iterable[torch.Tensor]) -> list[dict[str, Any] | None]:
        """For each parameter the identity of its gradient, if backward has made it and no call has reduced it."""
        parameters = list(parameters)
        return [
            next((known for hook in hooks.values() if (known := self._noted(hook, parameter.grad)) is not None), None)
            for parameter, hooks in zip(parameters, internals.accumulate_hooks(parameters), strict=True)
        ]

    def _noted(self, hook: object, grad: torch.Tensor | None) -> dict[str, Any] | None:
        """The identity of ``grad`` if ``hook``, of this policy, knows it as a gradient that waits for a call."""
        if grad is None or not isinstance(hook, (FrozenHook, BackwardHook)) or hook.policy is not self._policy:
            return None
        if isinstance(hook, FrozenHook):
            return hook.grad
        return internals.identity(grad) if hook.counts[hook.index] and not hook.is_consumed else None
