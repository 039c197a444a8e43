"""What is used of torch's groups, storages, hooks and compiler beyond their public API: read this when torch changes.

Only torch 2.13 was tried.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist

# Its functions have the default group as default arguments, taken when it is imported, which torch does for the first
# optimizer. Imported after init_process_group(), it keeps the group's threads alive past destroy_process_group(), and
# the interpreter aborted at exit ("terminate called without an active exception") in 5 of 13 runs; so it comes first.
import torch.distributed.nn.functional
from torch._C import Future  # then() returns one that is no torch.futures.Future
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._dynamo.guards import TensorGuards as TorchTensorGuards
from torch.autograd.profiler import record_function
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import _JoinConfig as JoinConfig
from torch.utils.dlpack import from_dlpack
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

# Names that torch exports half-heartedly.
__all__ = ["Future", "JoinConfig", "PrefixStore", "ProcessGroupGloo", "Store", "WeakIdKeyDictionary"]

P = ParamSpec("P")
T = TypeVar("T")


_USE_COUNT: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]  # not in its stubs
_PROFILER_ENABLED: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]  # likewise


def profiled(*names: object) -> AbstractContextManager[object]:
    """A range for torch's profiler, its name joined by ``::``; nothing (8 us less) while none is running."""
    if not _PROFILER_ENABLED():
        return nullcontext()
    return record_function("::".join(map(str, names)))


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements in row-major order, end to end, in one new tensor: half the time of a view of each in Python."""
    return torch._C._nn.flatten_dense_tensors(list(tensors))


def storage_use_count(flat: torch.Tensor) -> int:
    """How many tensors and storage objects share the memory of ``flat``, itself included."""
    return 1 + _references(flat) - _references_alone()


def _references(flat: torch.Tensor) -> int:
    storage = flat.untyped_storage()  # one Python object per memory: a user who keeps it adds to its own count only
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)


@cache
def _references_alone() -> int:
    """What a tensor that nobody shares counts: how torch ties the two objects together differs between its versions."""
    return _references(torch.empty(1, device="cpu"))


def grad_dtypes(tensors: Sequence[torch.Tensor]) -> list[torch.dtype | None]:
    """What the user said of each one's gradients; torch.set_default_device would cost 5 µs each."""
    with torch._C.DisableTorchFunction():
        return list(map(attrgetter("grad_dtype"), tensors))


class TensorGuards:
    """Remembers what tensors are like: type, dtype, device, requires_grad, shape, strides, conjugation and sign.

    It holds none of them. Asking each for all that takes 0.7 µs a tensor, this 0.15. Under other autocast or inference
    settings than it was made with it says no.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        sizes: list[list[int]] = [list(tensor.shape) for tensor in tensors]
        strides: list[list[int]] = [list(tensor.stride()) for tensor in tensors]
        self._guards = TorchTensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]

    def match(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these, as many as there were, are all like those."""
        return bool(self._guards.check(*tensors))


def is_grad_unshared(parameter: torch.Tensor) -> bool:
    """Whether there is a ``parameter.grad``, in memory of torch's own, and nothing else holds it or that memory."""
    found = _grad_ref_counts(parameter)
    return found is not None and found == _fresh_grad_ref_counts()


def _grad_ref_counts(parameter: torch.Tensor) -> tuple[int, ...] | None:
    grad = parameter.grad
    if grad is None or type(grad) is not torch.Tensor or grad.layout is not torch.strided:
        return None
    storage = grad.untyped_storage()
    # What comes from NumPy cannot be resized; who holds that memory, or shared memory, torch does not know.
    is_own = storage.resizable() and not storage.is_shared()
    return _USE_COUNT(grad), sys.getrefcount(grad), storage_use_count(grad), is_own


@cache
def _fresh_grad_ref_counts() -> tuple[int, ...] | None:
    parameter = torch.empty(1, device="cpu", requires_grad=True)
    with torch.no_grad():
        parameter.grad = parameter.clone()
    return _grad_ref_counts(parameter)


def under_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements. Who holds the result's storage does not count for that of ``tensor``, nor the reverse."""
    return from_dlpack(torch._C._to_dlpack(tensor))


def ref_counts(tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage]) -> tuple[set[int], ...]:
    """By how many each tensor, and each storage, is held: in C++ and in Python; which numbers occur.

    A variable or a list is a holder in Python, a ``.grad`` one in C++, which torch 2.13 counts in Python, too.
    """
    return (
        set(map(_USE_COUNT, tensors)),
        set(map(sys.getrefcount, tensors)),
        {torch._C._storage_Use_Count(storage._cdata) for storage in storages},
        set(map(sys.getrefcount, storages)),
    )


def accumulate_hooks(parameters: Iterable[torch.Tensor]) -> list[Mapping[int, Callable[[torch.Tensor], None]]]:
    """The post-accumulate hooks on each parameter, by the ids that their handles have."""
    with torch._C.DisableTorchFunction():  # subclasses need not know the name; torch.set_default_device costs 5 µs each
        return [getattr(parameter, "_post_accumulate_grad_hooks", None) or _NO_HOOKS for parameter in parameters]


def add_accumulate_hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Register a post-accumulate hook, also on a parameter that is frozen now, where the method of a tensor refuses."""
    with torch._C.DisableTorchFunction():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks is None:
            hooks = parameter._post_accumulate_grad_hooks = OrderedDict()
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def identity(tensor: torch.Tensor) -> dict[str, Any]:
    """What is another object for another tensor, and after ``torch.utils.swap_tensors()``: compare with ``is``.

    Who holds it keeps neither the tensor nor its memory alive, and needs no weak reference, with which torch does not
    swap. It is never written to.
    """
    return tensor.__dict__


def attach_hooks(tensor: torch.Tensor) -> None:
    """Make the hooks of a tensor run again after its contents were swapped.

    In Python they stay with the tensor, in C++ they go with the old contents; assigning them joins both again.
    """
    with torch._C.DisableTorchFunction():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if (hooks := getattr(tensor, name)) is not None:
                setattr(tensor, name, hooks)


_NO_HOOKS: Mapping[int, Callable[[torch.Tensor], None]] = {}


def call_last_before_step(optimizer: torch.optim.Optimizer, hook: Callable[..., Any]) -> bool:
    """Have torch call ``hook`` behind the optimizer's own pre-hooks, if there are any; whether torch will.

    To be asked in a global pre-hook: torch calls those first, and looks for the optimizer's own ones only then.
    """
    hooks = optimizer._optimizer_step_pre_hooks
    if not hooks:
        return False
    place = next((key for key, known in hooks.items() if known is hook), None)
    if place is None:
        optimizer.register_step_pre_hook(hook)
    elif place != next(reversed(hooks)):
        hooks[place] = hooks.pop(place)
    return True


def inside_backward() -> bool:
    """Whether the calling thread runs as part of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` is recording what the calling thread does."""
    return torch._C._get_tracing_state() is not None


def is_registered(group: dist.ProcessGroup) -> bool:
    """Whether torch still knows the group: false after ``destroy_process_group()``."""
    return group in c10d._world.pg_map


def group_store(group: dist.ProcessGroup) -> Store:
    """The key-value store that the members of ``group`` met on, under the group's own prefix."""
    return c10d._world.pg_map[group][1]


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout the user gave to ``group``; torch's default where its backend does not tell."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return cast(timedelta, options._timeout)
    return c10d.default_pg_timeout


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """``gloo``, ``nccl``, ...: what carries tensors of ``device`` in ``group``; RuntimeError if nothing does."""
    return str(group._get_backend(torch.device(device.type)).name())


def operation_options(kind: str, timeout: timedelta) -> Any:
    """Options for one operation (``Allreduce``, ``AllToAll``, ...), with a timeout of its own."""
    options = getattr(c10d, f"{kind}Options")()
    options.timeout = timeout
    return options


def runs_as_it_is(function: Callable[P, T]) -> Callable[P, T]:
    """Mark ``function``: inside a compiled step torch calls it and does not trace it. Costs nothing per call."""
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)  # this frame, not the frames that it calls
    set_code_exec_strategy(function.__code__, skip)
    return function


def leaves_compiled_code(function: Callable[P, T]) -> Callable[P, T]:
    """Mark ``function`` as one that torch.compile never traces, without importing the compiler for it."""
    return torch._disable_dynamo(function)  # type: ignore[attr-defined]  # not in its stubs
