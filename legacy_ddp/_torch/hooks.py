"""Hooks on tensors and on optimizers, and the identity of a tensor."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from legacy_ddp._torch.compiler import disable_dynamo

_NO_HOOKS: Mapping[int, Callable[[torch.Tensor], None]] = {}


def accumulate_hooks(parameters: Iterable[torch.Tensor]) -> list[Mapping[int, Callable[[torch.Tensor], None]]]:
    """The post-accumulate hooks on each parameter, by the ids of their handles."""
    with torch._C.DisableTorchFunction():  # subclasses need not know the name; torch.set_default_device costs 5 µs each
        return [getattr(parameter, "_post_accumulate_grad_hooks", None) or _NO_HOOKS for parameter in parameters]


def add_accumulate_hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Register a post-accumulate hook, also on a frozen parameter, which the method of torch refuses."""
    with torch._C.DisableTorchFunction():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks is None:
            hooks = parameter._post_accumulate_grad_hooks = OrderedDict()
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


@contextmanager
def without_accumulate_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """For the block, backward calls no post-accumulate hook of the parameters."""
    with torch._C.DisableTorchFunction():
        found = [getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters]
    # Emptied and filled again: torch's C++ side refers to the same dictionaries.
    emptied = [(hooks, dict(hooks)) for hooks in found if hooks]
    for hooks, _ in emptied:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in emptied:
            hooks.clear()
            hooks.update(before)


# An object per tensor, and another object after torch.utils.swap_tensors(): compare with `is`. A reference to it
# keeps neither the tensor nor its memory alive. A weak reference would do the same, but torch refuses to swap tensors
# with weak references. Never written to. In C, because a call asks for the identity of every parameter.
identity: Callable[[torch.Tensor], dict[str, Any]] = attrgetter("__dict__")


def attach_hooks(tensor: torch.Tensor) -> None:
    """Make the hooks of a tensor run again after ``torch.utils.swap_tensors()``.

    In Python the hooks stay with the tensor, in C++ they move with the contents. Assigning them again joins both.
    """
    with torch._C.DisableTorchFunction():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if (hooks := getattr(tensor, name)) is not None:
                setattr(tensor, name, hooks)


def before_every_step(hook: Callable[..., Any]) -> None:
    """Make torch call ``hook`` before every step of every optimizer, after the optimizer's own pre-hooks."""

    # Torch calls global pre-hooks first, and looks up the optimizer's pre-hooks after them.
    @disable_dynamo
    def first(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hooks = optimizer._optimizer_step_pre_hooks
        if not hooks:
            return hook(optimizer, args, kwargs)
        place = next((key for key, known in hooks.items() if known is hook), None)
        if place is None:
            optimizer.register_step_pre_hook(hook)
        elif place != next(reversed(hooks)):
            hooks[place] = hooks.pop(place)
        return None

    register_optimizer_step_pre_hook(first)
