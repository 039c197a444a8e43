"""Every use of torch's groups, storages, hooks and compiler beyond the public API: to be reviewed when torch changes.

Tested with torch 2.13 only.
"""

import gc
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

# Imported here, before init_process_group(). Its functions have the default group as default arguments, bound at the
# import, which torch otherwise makes for the first optimizer. Then the threads of the group stay alive after
# destroy_process_group(): the interpreter aborted at exit ("terminate called without an active exception") in 5 of 13
# runs.
import torch.distributed.nn.functional
from torch._C import Future  # then() returns this type, not torch.futures.Future
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._dynamo.guards import TensorGuards as DynamoGuards
from torch.autograd.profiler import record_function
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.join import _JoinConfig as JoinConfig
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.dlpack import from_dlpack
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

# Names without an explicit export in torch.
__all__ = ["Future", "JoinConfig", "PrefixStore", "ProcessGroupGloo", "Store", "WeakIdKeyDictionary"]

P = ParamSpec("P")
T = TypeVar("T")


_USE_COUNT: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]  # not in the stubs
_PROFILER_ENABLED: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]  # not in the stubs


def profiled(*names: object) -> AbstractContextManager[object]:
    """A range for torch's profiler, named by ``names`` joined with ``::``; nothing (8 us less) without a profiler."""
    if not _PROFILER_ENABLED():
        return nullcontext()
    return record_function("::".join(map(str, names)))


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements in row-major order, end to end, in one new tensor: half the time of views made in Python."""
    return torch._C._nn.flatten_dense_tensors(list(tensors))


def storage_use_count(flat: torch.Tensor) -> int:
    """Number of tensors and storage objects on the memory of ``flat``, including ``flat``."""
    return 1 + _references(flat) - _references_alone()


def _references(flat: torch.Tensor) -> int:
    storage = flat.untyped_storage()  # one Python object per memory, also for a reference of the user's
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)


@cache
def _references_alone() -> int:
    """The references of an unshared tensor, measured: the number depends on the version of torch."""
    return _references(torch.empty(1, device="cpu"))


def grad_dtypes(tensors: Sequence[torch.Tensor]) -> list[torch.dtype | None]:
    """``grad_dtype`` of each tensor, without the 5 µs per tensor that torch.set_default_device adds."""
    with torch._C.DisableTorchFunction():
        return list(map(attrgetter("grad_dtype"), tensors))


class TensorGuards:
    """Comparison with earlier tensors: type, dtype, device, requires_grad, shape, strides, conjugation and sign.

    Keeps no tensor alive. Takes 0.15 µs a tensor; a comparison in Python takes 0.7 µs. Under other autocast or
    inference settings than at construction no tensor matches.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        sizes: list[list[int]] = [list(tensor.shape) for tensor in tensors]
        strides: list[list[int]] = [list(tensor.stride()) for tensor in tensors]
        self._guards = DynamoGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]

    def match(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether ``tensors``, of the same number, all match."""
        return bool(self._guards.check(*tensors))


def is_only_in_grad(parameter: torch.Tensor) -> bool:
    """Whether ``parameter.grad`` exists, in memory of torch, without another reference to the tensor or its memory."""
    found = _grad_ref_counts(parameter)
    return found is not None and found == _fresh_grad_ref_counts()


def _grad_ref_counts(parameter: torch.Tensor) -> tuple[int, ...] | None:
    grad = parameter.grad
    if grad is None or type(grad) is not torch.Tensor or grad.layout is not torch.strided:
        return None
    storage = grad.untyped_storage()
    # Memory from NumPy cannot be resized. Torch does not count references to such memory, or to shared memory.
    is_own = storage.resizable() and not storage.is_shared()
    return _USE_COUNT(grad), sys.getrefcount(grad), storage_use_count(grad), is_own


@cache
def _fresh_grad_ref_counts() -> tuple[int, ...] | None:
    parameter = torch.empty(1, device="cpu", requires_grad=True)
    with torch.no_grad():
        parameter.grad = parameter.clone()
    return _grad_ref_counts(parameter)


def under_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, under a storage with reference counts of its own."""
    return from_dlpack(torch._C._to_dlpack(tensor))


def storage_handles(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """The addresses of the storages in C++, for :func:`ref_counts`."""
    return [storage._cdata for storage in storages]


def ref_counts(
    tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage], handles: Sequence[int]
) -> tuple[set[int], ...]:
    """The reference counts that occur: of tensors in C++ and in Python, of storages in C++ and in Python.

    ``handles``: of the storages. A variable or a list adds to the count in Python. A ``.grad`` adds to the count in
    C++, in torch 2.13 to both.
    """
    return (
        set(map(_USE_COUNT, tensors)),
        set(map(sys.getrefcount, tensors)),
        set(map(torch._C._storage_Use_Count, handles)),
        set(map(sys.getrefcount, storages)),
    )


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


def identity(tensor: torch.Tensor) -> dict[str, Any]:
    """An object per tensor, and another object after ``torch.utils.swap_tensors()``: compare with ``is``.

    A reference to it keeps neither the tensor nor its memory alive. A weak reference would do the same, but torch
    refuses to swap tensors with weak references. Never written to.
    """
    return tensor.__dict__


def attach_hooks(tensor: torch.Tensor) -> None:
    """Make the hooks of a tensor run again after ``torch.utils.swap_tensors()``.

    In Python the hooks stay with the tensor, in C++ they move with the contents. Assigning them again joins both.
    """
    with torch._C.DisableTorchFunction():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if (hooks := getattr(tensor, name)) is not None:
                setattr(tensor, name, hooks)


_NO_HOOKS: Mapping[int, Callable[[torch.Tensor], None]] = {}


def used_scaler() -> torch.amp.GradScaler | None:
    """The GradScaler in this process that has scaled a loss; of several the one with the largest scale.

    Looks at all objects of the process: for rare moments alone.
    """
    scalers = [found for found in gc.get_objects() if issubclass(type(found), torch.amp.GradScaler)]
    used = [scaler for scaler in scalers if scaler.is_enabled() and scaler._scale is not None]
    return max(used, key=torch.amp.GradScaler.get_scale, default=None)


def local_buffer_names(module: torch.nn.Module) -> set[str]:
    """Names of the buffers of normalisation layers, which are statistics, and of buffers that are not saved."""
    found: set[str] = set()
    for prefix, child in module.named_modules(remove_duplicate=False):
        names = child._buffers if isinstance(child, _NormBase) else child._non_persistent_buffers_set
        found.update(f"{prefix}.{name}" if prefix else name for name in names)
    return found


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


def inside_backward() -> bool:
    """Whether the calling thread runs as part of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` records the calling thread."""
    return torch._C._get_tracing_state() is not None


def is_registered(group: dist.ProcessGroup) -> bool:
    """Whether the group exists in torch: false after ``destroy_process_group()``."""
    return group in c10d._world.pg_map


def group_store(group: dist.ProcessGroup) -> Store:
    """The key-value store of ``group``, under the prefix of the group."""
    return c10d._world.pg_map[group][1]


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout of ``group``; torch's default if the backend has no such option."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return cast(timedelta, options._timeout)
    return c10d.default_pg_timeout


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Backend for tensors of ``device`` in ``group``: ``gloo``, ``nccl``, ...; RuntimeError without a backend."""
    return str(group._get_backend(torch.device(device.type)).name())


def operation_options(kind: str, timeout: timedelta) -> Any:
    """Options for one operation (``Allreduce``, ``AllToAll``, ...), with its timeout."""
    options = getattr(c10d, f"{kind}Options")()
    options.timeout = timeout
    return options


def skip_tracing(function: Callable[P, T]) -> Callable[P, T]:
    """Mark ``function``: inside a compiled step torch calls the function without tracing. Costs nothing per call."""
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)  # this frame, but not the frames below
    set_code_exec_strategy(function.__code__, skip)
    return function


def disable_dynamo(function: Callable[P, T]) -> Callable[P, T]:
    """Mark ``function``: torch.compile never traces it. Does not import the compiler."""
    return torch._disable_dynamo(function)  # type: ignore[attr-defined]  # not in the stubs
