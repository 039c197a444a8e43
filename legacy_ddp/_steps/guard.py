"""The refusal of an optimizer step with gradients that it must not use, before anything changes.

Gradients of this rank alone, because the call was forgotten or a layer was frozen before it, and earlier results that a
later call has divided again.

A script may thaw a layer, run backward, and freeze the layer again before the call. The optimizer still holds the
layer, and its ``.grad`` has the gradient of this rank alone. Nothing in the call shows that: the parameters are those
of the call before. So a hook on each frozen parameter notes the gradient that a backward makes, and the guard looks for
it in every step.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from legacy_ddp import _torch as internals
from legacy_ddp._errors import GradientError, UnsynchronizedStepError
from legacy_ddp._log import defined_at, hook_line, shorten_display
from legacy_ddp._steps.backward_counter import (
    BackwardHook,
    PassiveHook,
    is_any_counting,
    is_any_divided_again,
    remove_hooks,
)
from legacy_ddp._steps.policy import StepPolicy
from legacy_ddp._text import printable
from legacy_ddp._torch import device as devices

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
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


@cache
def guard_steps() -> None:
    """Check every step of every optimizer in this process from now on. Later calls do nothing."""
    internals.before_every_step(_check_step)  # after the optimizer's own pre-hooks: one of them may make the call


def _check_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Check now, or after the closure if there is a closure, because the closure makes the gradients.

    ``args`` begin with the optimizer.
    """
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _checked(kwargs["closure"], optimizer)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], _checked(args[1], optimizer), *args[2:]), kwargs
    _check(optimizer)
    return None


def _checked(closure: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    check = internals.disable_dynamo(_check)  # the closure may be compiled

    @wraps(closure)
    def checked(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        check(optimizer)
        return loss

    return checked


def _check(optimizer: torch.optim.Optimizer) -> None:
    """Raise before anything changes if the step would use a gradient of this rank alone, or a result divided again."""
    if is_any_counting() or with_gradients or internals.inside_backward():
        _refuse_unsynchronized(optimizer)
    if is_any_divided_again():
        _refuse_divided_again(optimizer)


def _refuse_unsynchronized(optimizer: torch.optim.Optimizer) -> None:
    found = [pair for group in optimizer.param_groups for pair in unsynchronized(group["params"])]
    # Zeros change no step: zero_grad(set_to_none=False) leaves zeros of a dropped gradient.
    if any(hook.policy.has_leaves or (at.grad is not None and devices.has_nonzero(at.grad)) for at, hook in found):
        hooks = [hook for at, hook in found if hook.policy.has_leaves or at.grad is not None]
        error = UnsynchronizedStepError(_text(optimizer, hooks), parameter=hooks[0].name)
        shorten_display(error)
        raise error


def _refuse_divided_again(optimizer: torch.optim.Optimizer) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = [
        hook.name
        for parameter, hooks in zip(parameters, internals.accumulate_hooks(parameters), strict=True)
        for hook in hooks.values()
        if type(hook) is BackwardHook
        and hook.was_divided_again(grad := parameter.grad)
        and grad is not None
        and devices.has_nonzero(grad)
    ]
    if found:
        error = GradientError(
            f"{_name_step(optimizer)} would use grad of {found[0]!r} ({len(found)} of {len(parameters)} "
            "parameters), which holds the result of an earlier call that a later all_reduce(sample_size=...) has "
            "divided again, because it was not cleared between them; call zero_grad() for these parameters before the "
            "next backward(), or, to add up over several calls before one step, divide the loss and call all_reduce() "
            "without sample_size",
            parameter=found[0],
        )
        shorten_display(error)
        raise error


def unsynchronized(parameters: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, BackwardHook | FrozenHook]]:
    """The parameters with unreduced gradients, each with a guarding hook.

    A parameter is unsynchronized if backward reached it after the last call of every counter on it: where several
    wrappers share a parameter, a single call is enough. A counter inside ``no_sync()`` lets every step pass, and
    marks the counted gradients as consumed. Leaves are not consumed: they wait for the call whatever a step does.
    ``is_in_backward``: the step runs in a hook, perhaps before the hook that counts: a gradient that no call left is
    new.
    """
    for parameter, hooks in zip(parameters, internals.accumulate_hooks(parameters), strict=True):
        guard: BackwardHook | FrozenHook | None = None
        for hook in hooks.values():
            if not (type(hook) is BackwardHook or type(hook) is FrozenHook):  # a hook of the user
                continue
            if not _waits_for_call(hook, parameter):
                if type(hook) is BackwardHook:
                    break
                continue
            if not hook.policy.sync_enabled:
                _consume(hook)
                hook.policy.has_stepped_locally = True
                break
            if hook.policy.guarded and guard is None:
                guard = hook
        else:
            if guard is not None:
                yield parameter, guard


def _waits_for_call(hook: BackwardHook | FrozenHook, parameter: torch.Tensor) -> bool:
    """Whether backward has made the gradient of ``parameter`` since the last call of the hook's wrapper.

    A step in a hook of the script may come before the hook that counts: then a gradient that no call left is new.
    """
    if isinstance(hook, BackwardHook):
        return hook.counts[hook.index] > 0 or (internals.inside_backward() and not hook.was_reduced(parameter.grad))
    if hook.grad is not None and (parameter.grad is None or internals.identity(parameter.grad) is not hook.grad):
        hook.forget()
    return hook.grad is not None


def _consume(hook: BackwardHook | FrozenHook) -> None:
    """A step inside ``no_sync()`` uses the gradient."""
    if isinstance(hook, FrozenHook):
        hook.forget()
    else:
        hook.is_consumed = hook.policy.has_local_steps = not hook.policy.has_leaves


def _text(optimizer: torch.optim.Optimizer, hooks: Sequence[BackwardHook | FrozenHook]) -> str:
    unreduced = [hook for hook in hooks if isinstance(hook, BackwardHook)]
    if not unreduced:
        return (
            f"{_name_step(optimizer)} would use gradients that no all_reduce() has reduced:\n"
            f"  {_which(hooks)}\n"
            "backward made them, and the parameters were frozen (requires_grad=False) before the call, which leaves\n"
            "frozen parameters out; freeze them after step(), or clear their gradients when you freeze them"
        )
    return (
        f"{_name_step(optimizer)} would use gradients that were not reduced since the last backward:\n"
        f"  {_which(unreduced)}\n{_next_step()}"
    )


def _next_step() -> str:
    if hook := hook_line():
        return (
            f"this step() runs inside of backward(), in a hook of the script:\n  {hook}\n"
            "remove this hook: there is no place for all_reduce() before its step(); step\n"
            "once, after backward() and model.all_reduce()"
        )
    return (
        "call model.all_reduce() between backward() and step(); a step meant for this\n"
        'rank alone belongs inside no_sync(); Checks(unsynchronized_step="allow")\n'
        "switches this check off"
    )


def _name_step(optimizer: torch.optim.Optimizer) -> str:
    return f"step() of {printable(type(optimizer).__name__)}"


def _which(hooks: Sequence[BackwardHook | FrozenHook]) -> str:
    # Parameters of several wrappers in a script may have equal names.
    classes = dict.fromkeys(hook.policy.module_class for hook in hooks if hook.policy.module_class)
    of_class = f" of the wrapped {', '.join(classes)}" if classes else ""
    single = f"parameter {hooks[0].name!r}{of_class}"
    return f"{len(hooks)} parameters{of_class}, first {hooks[0].name!r}" if len(hooks) > 1 else single


def hooks_of_script(parameters: Iterable[torch.Tensor]) -> list[str]:
    """``train.py:10 in fused_step``: where each hook of the script begins that backward calls with a gradient of the
    parameters."""
    found = (defined_at(hook) for hooks in internals.gradient_hooks(parameters) for hook in hooks)
    return [*dict.fromkeys(filter(None, found))]
