"""Torch's compiler, tracer and profiler, and the state of the backward pass."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd.profiler import record_function
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

P = ParamSpec("P")
T = TypeVar("T")

is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]  # not in the stubs


def profiled(*names: object) -> AbstractContextManager[object]:
    """A range for torch's profiler, named by ``names`` joined with ``::``; nothing (8 us less) without a profiler."""
    return record_function("::".join(map(str, names))) if is_profiling() else nullcontext()


def begin_range(*names: object) -> AbstractContextManager[object]:
    """As :func:`profiled`, and begun already."""
    profiler = profiled(*names)
    profiler.__enter__()
    return profiler


def inside_backward() -> bool:
    """Whether the calling thread runs as part of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` records the calling thread."""
    return torch._C._get_tracing_state() is not None


def skip_tracing(function: Callable[P, T]) -> Callable[P, T]:
    """Mark ``function``: inside a compiled step torch calls the function without tracing. Costs nothing per call."""
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)  # this frame, but not the frames below
    set_code_exec_strategy(function.__code__, skip)
    return function


def skip_tracing_below(function: Callable[P, T]) -> Callable[P, T]:
    """Mark ``function``: torch.compile traces neither the function nor its callees. Costs nothing per call."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def inside_of_compiled(module: nn.Module) -> nn.Module:
    """The module in ``torch.compile(module)``; any other module itself.

    The list of private names lacks this attribute: to look for its class would import the compiler. In a torch without
    the attribute the module with the compiled code stands for itself.
    """
    return getattr(module, "_orig_mod", module)


def has_compiled_call(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def disable_dynamo(function: Callable[P, T]) -> Callable[P, T]:
    """Mark ``function``: torch.compile never traces it. Does not import the compiler."""
    return torch._disable_dynamo(function)  # type: ignore[attr-defined]  # not in the stubs


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
