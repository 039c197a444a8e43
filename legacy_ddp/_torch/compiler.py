"""Torch's compiler, tracer and profiler, and the state of the backward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd.profiler import record_function

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
