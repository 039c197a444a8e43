"""Would this optimizer's step use gradients that were not reduced? The guard for the forgotten call."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from legacy_ddp import _torch as internals
from legacy_ddp._errors import UnsynchronizedStepError
from legacy_ddp._step_guard.backward_counter import unsynchronized

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@cache
def guard_steps() -> None:
    """Look at every step of every optimizer in this process from now on; once is enough."""
    register_optimizer_step_pre_hook(_before_step)


@internals.leaves_compiled_code
def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Torch's hook. The optimizer's own pre-hooks come first: one of them may make the call."""
    return None if internals.call_last_before_step(optimizer, _judge) else _judge(optimizer, args, kwargs)


@internals.leaves_compiled_code
def _judge(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """``args`` begin with the optimizer. With a closure, the gradients that count are those it makes."""
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _checked(kwargs["closure"], optimizer)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], _checked(args[1], optimizer), *args[2:]), kwargs
    _check(optimizer)
    return None


def _checked(closure: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    @wraps(closure)
    def checked(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        _check(optimizer)
        return loss

    return checked


@internals.leaves_compiled_code
def _check(optimizer: torch.optim.Optimizer) -> None:
    """Raise before anything changes if a gradient that the step would use is this rank's alone."""
    names = [
        hook.name
        for group in optimizer.param_groups
        for parameter, hook in unsynchronized(group["params"])
        if hook.policy.has_leaves or _moves(parameter.grad)
    ]
    if names:
        raise UnsynchronizedStepError(_text(optimizer, names), parameter=names[0])


def _moves(grad: torch.Tensor | None) -> bool:
    """Whether a step can follow ``grad``: zeros are what ``zero_grad(set_to_none=False)`` leaves of a dropped one."""
    if grad is None:
        return False
    return bool((grad.coalesce().values() if grad.is_sparse else grad).any())


def _text(optimizer: torch.optim.Optimizer, names: list[str]) -> str:
    count = f"{len(names)} parameters, first" if len(names) > 1 else "parameter"
    return (
        f"step() of {type(optimizer).__name__} would use gradients that were not reduced since the last backward: "
        f"{count} {names[0]!r}; call model.all_reduce() between backward() and step() (a step meant for this rank "
        'alone belongs inside no_sync(); Checks(unsynchronized_step="allow") switches this check off)'
    )
