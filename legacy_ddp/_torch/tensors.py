"""Calls of torch: tensors (memory, comparison, hooks), backward, compiler, optimizers, normalisation layers, scaler."""

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._dynamo.guards import TensorGuards as DynamoGuards
from torch.amp.grad_scaler import OptState
from torch.autograd.function import BackwardCFunction
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.profiler import record_function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import optimizer as step_hooks
from torch.utils.dlpack import from_dlpack
from torch.utils.hooks import RemovableHandle

from legacy_ddp._interrupts import undone_by

_USE_COUNT: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]  # not in the stubs
_HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")  # new in torch 2.10
_SCALER_STEP = torch.amp.GradScaler.step.__code__
_FUNCTION_BACKWARD = BackwardCFunction.apply.__code__
_NO_HOOKS: Mapping[int, Callable[[torch.Tensor], None]] = {}
# Torch will remove its quantized dtypes. Those that are not here have several elements in a byte.
_QUANTIZED = (("qint8", torch.int8), ("quint8", torch.uint8), ("qint32", torch.int32))
_INTEGERS: Mapping[torch.dtype, torch.dtype] = {
    getattr(torch, name): integer for name, integer in _QUANTIZED if hasattr(torch, name)
}
P = ParamSpec("P")
T = TypeVar("T")

foreach_copy = torch._foreach_copy_
foreach_norm = torch._foreach_norm
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]  # not in the stubs
# An object per tensor, and another object after torch.utils.swap_tensors(): compare with `is`. A reference to it
# keeps neither the tensor nor its memory alive. Not a weak reference, because torch refuses to swap tensors with weak
# references. Never written to. In C, because a call asks for the identity of every parameter.
identity: Callable[[torch.Tensor], dict[str, Any]] = attrgetter("__dict__")

# One hook of torch calls all of them, because each call from torch of a function without tracing costs a microsecond.
# An ordered set: after an exception a hook may be registered a second time, and must not run twice.
_pre_hooks: dict[Callable[..., Any], None] = {}
_post_hooks: dict[Callable[..., Any], None] = {}


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements in row-major order, one tensor after the other, in one new tensor."""
    if all(tensor.dim() == 1 for tensor in tensors):  # takes a fifth of the time
        return torch.cat(list(tensors))
    return torch._C._nn.flatten_dense_tensors(list(tensors))  # takes half the time of views made in Python


def sparse_tensor(
    indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int], *, is_coalesced: bool = False
) -> torch.Tensor:
    """A sparse COO tensor. Indices and values are not checked."""
    # torch.sparse_coo_tensor() of torch 2.11 and 2.12 warns that it checks nothing, even if the caller asks for that.
    tensor: torch.Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        indices.shape[0],
        values.dim() - 1,
        shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=is_coalesced,
    )
    return tensor


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether the tensor is quantized with several elements in a byte."""
    return tensor.is_quantized and tensor.dtype not in _INTEGERS


def integers_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a quantized tensor that is not packed, as integers: torch joins quantized tensors only of equal scale,
    and ``copy_()`` leaves the scale as it was."""
    view = torch.empty(0, dtype=_INTEGERS[tensor.dtype], device=tensor.device)
    return view.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def quantizer_of(tensor: torch.Tensor) -> str:
    """The scale and the zero point of a quantized tensor, or those of each channel."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"scale {tensor.q_scale()!r}, zero point {tensor.q_zero_point()}"
    scales, zero_points = tensor.q_per_channel_scales().tolist(), tensor.q_per_channel_zero_points().tolist()
    return f"scales {scales}, zero points {zero_points} of axis {tensor.q_per_channel_axis()}"


def grad_dtypes(tensors: Sequence[torch.Tensor]) -> list[torch.dtype | None]:
    if not _HAS_GRAD_DTYPE:  # gradients have the dtype of their tensor
        return [tensor.dtype for tensor in tensors]
    with torch._C.DisableTorchFunction():  # otherwise torch.set_default_device adds 5 µs per tensor
        return list(map(attrgetter("grad_dtype"), tensors))


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes to a tensor; 0 for a tensor made in inference mode, which counts none."""
    return 0 if tensor.is_inference() else tensor._version


def storage_use_count(flat: torch.Tensor) -> int:
    """Number of tensors and storage objects on the memory of ``flat``, including ``flat``."""
    return 1 + _references(flat) - _references_alone()


def has_memory_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor is on the memory of ``tensor``, as far as torch knows."""
    return storage_use_count(tensor) == 1 and is_memory_counted(tensor)


def is_memory_counted(tensor: torch.Tensor) -> bool:
    """Whether torch knows all references to the memory of ``tensor``: not if it is from NumPy, or shared."""
    if tensor.layout is not torch.strided:  # torch makes the memory of a sparse tensor
        return True
    storage = tensor.untyped_storage()
    # Memory from NumPy is not resizable. Nor may be that of a device, and memory of CUDA always counts as shared.
    return tensor.device.type != "cpu" or (storage.resizable() and not storage.is_shared())


def _references(flat: torch.Tensor) -> int:
    storage = flat.untyped_storage()  # one Python object per memory, which the script gets, too
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)


@cache
def _references_alone() -> int:
    """The references to the memory of a single tensor, measured: the number depends on the version of torch."""
    return _references(torch.empty(1, device="cpu"))


def is_part(tensor: torch.Tensor) -> bool:
    """Whether a plain dense tensor is a part of a larger tensor, or its memory is from NumPy, or shared."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() > tensor.nbytes or not is_memory_counted(tensor)


def is_only_in_grad(parameter: torch.Tensor) -> bool:
    """Whether ``parameter.grad`` exists, in memory of torch, and nothing else refers to it or to its memory."""
    found = _grad_ref_counts(parameter)
    return found is not None and found == _fresh_grad_ref_counts()


def is_grad_held(parameter: torch.Tensor) -> bool:
    """Whether ``parameter.grad`` is a plain dense tensor, and something else refers to this tensor."""
    found, fresh = _grad_ref_counts(parameter), _fresh_grad_ref_counts()
    return found is not None and fresh is not None and found[:2] != fresh[:2]


def _grad_ref_counts(parameter: torch.Tensor) -> tuple[int, ...] | None:
    grad = parameter.grad
    if grad is None or type(grad) is not torch.Tensor or grad.layout is not torch.strided:
        return None
    return _USE_COUNT(grad), sys.getrefcount(grad), storage_use_count(grad), is_memory_counted(grad)


@cache
def _fresh_grad_ref_counts() -> tuple[int, ...] | None:
    parameter = torch.empty(1, device="cpu", requires_grad=True)
    with torch.no_grad():
        parameter.grad = parameter.clone()
    return _grad_ref_counts(parameter)


def under_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, under a storage with reference counts of its own."""
    return from_dlpack(torch._C._to_dlpack(tensor))


def preserved_versions(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """A block that leaves the version counters of ``tensors`` as they were. The caller restores the values."""
    return _unsafe_preserve_version_counter(tuple(tensor for tensor in tensors if not tensor.is_inference()))


def storage_key(tensor: torch.Tensor) -> int | None:
    """A number, equal for tensors on the same storage; None for a tensor without a storage, such as a sparse one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def weak_storage(tensor: torch.Tensor) -> StorageWeakRef:
    """A reference that reserves the :func:`storage_key`. The memory can be freed."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def storage_handles(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """The addresses of the storages in C++, for :func:`ref_counts`."""
    return [storage._cdata for storage in storages]


def ref_counts(
    tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage], handles: Sequence[int]
) -> tuple[set[int], ...]:
    """The different reference counts: of tensors in C++ and in Python, of storages in C++ and in Python.

    ``handles``: of the storages. A variable or a list adds to the count in Python, a ``.grad`` to the count in C++, in
    torch 2.13 to both.
    """
    return (
        set(map(_USE_COUNT, tensors)),
        set(map(sys.getrefcount, tensors)),
        set(map(torch._C._storage_Use_Count, handles)),
        set(map(sys.getrefcount, storages)),
    )


class TensorGuards:
    """Compares tensors with the tensors that the constructor got, without keeping these alive.

    Compares type, dtype, device, requires_grad, shape, strides, and the bits for conjugation and sign. If autocast or
    inference mode has changed since the construction, no tensor matches.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        sizes: list[list[int]] = [list(tensor.shape) for tensor in tensors]
        strides: list[list[int]] = [list(tensor.stride()) for tensor in tensors]
        guards = DynamoGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
        # match(*tensors) takes 0.15 µs a tensor, a comparison in Python 0.7 µs. Every call asks three times.
        self.match: Callable[..., bool] = guards.check


def accumulate_hooks(parameters: Iterable[torch.Tensor]) -> list[Mapping[int, Callable[[torch.Tensor], None]]]:
    """The post-accumulate hooks of each parameter, by the ids of their handles."""
    with torch._C.DisableTorchFunction():  # subclasses need not know the name; torch.set_default_device costs 5 µs each
        found = list(map(attrgetter("_post_accumulate_grad_hooks"), parameters))
    return [_NO_HOOKS if hooks is None else hooks for hooks in found] if None in found else found


def gradient_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[list[Callable[..., object]]]:
    """The functions that backward calls with the gradient of each parameter: tensor hooks and post-accumulate hooks."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    for parameter in parameters:
        with torch._C.DisableTorchFunction():
            tables = [getattr(parameter, name, None) or {} for name in names]
        yield [hook for table in tables for hook in table.values()]


def add_accumulate_hook(
    parameter: torch.Tensor, hook: Callable[[torch.Tensor], None], handles: list[RemovableHandle] | None = None
) -> None:
    """Register a post-accumulate hook, also on a frozen parameter, which the method of torch refuses."""
    with torch._C.DisableTorchFunction():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks is None:
            hooks = parameter._post_accumulate_grad_hooks = OrderedDict()
    handle = RemovableHandle(hooks)
    if handles is not None:  # first, so that no hook is without its handle after an interrupt
        handles.append(handle)
    hooks[handle.id] = hook


@contextmanager
def without_accumulate_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """For the block, backward calls no post-accumulate hook of the parameters."""
    with torch._C.DisableTorchFunction():
        found = [getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters]
    # Emptied and filled again: torch's C++ side refers to the same dictionaries.
    emptied = [(hooks, dict(hooks)) for hooks in found if hooks]

    def put_back() -> None:
        for hooks, before in emptied:
            if list(hooks) != list(before):
                hooks.clear()
                hooks.update(before)

    with undone_by(put_back):
        for hooks, _ in emptied:
            hooks.clear()
        yield


def attach_hooks(tensor: torch.Tensor) -> None:
    """Make the hooks of a tensor run again after ``torch.utils.swap_tensors()``."""
    # In Python the hooks stay with the tensor, in C++ they move with the contents. Assigning them again joins both.
    with torch._C.DisableTorchFunction():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if (hooks := getattr(tensor, name)) is not None:
                setattr(tensor, name, hooks)


def inside_backward() -> bool:
    return current_backward() != -1


current_backward: Callable[[], int] = torch._C._current_graph_task_id  # the number of the pass of this thread, or -1


def frame_of(code: CodeType) -> FrameType | None:
    """The innermost frame of the calling thread that runs ``code``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def inside_function_backward() -> bool:
    """Whether the calling thread runs the ``backward()`` of an autograd.Function, such as a re-entrant checkpoint."""
    return frame_of(_FUNCTION_BACKWARD) is not None


def inside_compiled_backward() -> bool:
    """Whether compiled code of a backward pass runs. Its engine calls no function of :func:`at_end_of_backward`."""
    # Not in the list of private names: the check of this list would import the compiler.
    return getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False)


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call ``function`` at the end of the present backward pass, unless an exception ends the pass."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def profiler_range(*names: object) -> AbstractContextManager[object]:
    """A range for torch's profiler, named ``names`` joined with ``::``. Takes 8 µs: ask :func:`is_profiling` first."""
    return record_function("::".join(map(str, names)))


def is_tracing() -> bool:
    return torch._C._get_tracing_state() is not None


def skip_tracing(function: Callable[P, T]) -> Callable[P, T]:
    """Mark ``function``: inside a compiled step torch calls it without tracing. Costs nothing per call."""
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)  # this frame, but not the frames below
    set_code_exec_strategy(function.__code__, skip)
    return function


def skip_tracing_below(function: Callable[P, T]) -> Callable[P, T]:
    """Mark ``function``: torch.compile traces neither it nor its callees. Costs nothing per call."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def keeps_grad_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Mark ``function``: at its end autograd is on or off as before, also after an interrupt in ``torch.no_grad()``."""

    @wraps(function)
    def keeping(*args: P.args, **kwargs: P.kwargs) -> T:
        was_enabled = torch.is_grad_enabled()
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(was_enabled)  # a function in C: no signal handler runs before it

    return keeping


set_grad_mode: Callable[[bool], None] = torch._C._set_grad_enabled
NO_MODE = nullcontext()


def disable_dynamo(function: Callable[P, T]) -> Callable[P, T]:
    """Mark ``function``: torch.compile never traces it. Does not import the compiler, unlike the public decorator."""
    return torch._disable_dynamo(function)  # type: ignore[attr-defined]  # not in the stubs


def inside_of_compiled(module: nn.Module) -> nn.Module:
    """The module in ``torch.compile(module)``; any other module itself."""
    # Not in the list of private names: the check of this list would import the compiler.
    return getattr(module, "_orig_mod", module)


def has_compiled_call(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None


def before_every_step(hook: Callable[..., Any]) -> None:
    """Call ``hook`` before every step of every optimizer, after the optimizer's own pre-hooks. Never traced."""
    _pre_hooks[hook] = None
    add_step_pre_hook(_run_or_postpone_pre_hooks)


def after_every_step(hook: Callable[..., object]) -> None:
    """Call ``hook`` after every step of every optimizer that raised no error. Never traced."""
    _post_hooks[hook] = None
    if _run_post_hooks not in step_hooks._global_optimizer_post_hooks.values():
        step_hooks.register_optimizer_step_post_hook(_run_post_hooks)


def add_step_pre_hook(hook: Callable[..., Any]) -> None:
    """Call ``hook`` before every step of every optimizer, before the optimizer's own pre-hooks. A second registration
    has no effect: the first may have been interrupted at its end."""
    if hook not in step_hooks._global_optimizer_pre_hooks.values():
        step_hooks.register_optimizer_step_pre_hook(hook)


def remove_step_pre_hook(hook: Callable[..., Any]) -> None:
    """Undo :func:`add_step_pre_hook`. May be called without it."""
    for key in [key for key, known in step_hooks._global_optimizer_pre_hooks.items() if known is hook]:
        step_hooks._global_optimizer_pre_hooks.pop(key, None)


def _run_pre_hooks(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call all hooks in order. As with torch's hooks, each may return other arguments of the step."""
    changed = None
    for hook in tuple(_pre_hooks):
        result = hook(optimizer, args, kwargs)
        if result is not None:
            args, kwargs = changed = result
    return changed


_last_pre_hook = disable_dynamo(_run_pre_hooks)  # registered on optimizers with pre-hooks of their own


@disable_dynamo
def _run_or_postpone_pre_hooks(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Torch calls global pre-hooks first, and looks up the optimizer's pre-hooks after them.
    hooks = optimizer._optimizer_step_pre_hooks
    if not hooks:
        return _run_pre_hooks(optimizer, args, kwargs)
    place = next((key for key, known in hooks.items() if known is _last_pre_hook), None)
    if place is None:
        optimizer.register_step_pre_hook(_last_pre_hook)
    elif place != next(reversed(hooks)):
        hooks[place] = hooks.pop(place)
    return None


@disable_dynamo
def _run_post_hooks(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for hook in tuple(_post_hooks):
        hook(optimizer, args, kwargs)


def unsaved_buffer_names(module: nn.Module) -> set[str]:
    children = module.named_modules(remove_duplicate=False)
    return {name for prefix, child in children for name in _full_names(prefix, child._non_persistent_buffers_set)}


def updated_statistics_names(module: nn.Module) -> set[str]:
    """Names of the buffers that a forward pass would change: of normalisation layers in training, with statistics."""
    found: set[str] = set()
    for prefix, layer in _norm_layers(module):
        if layer.training and layer.track_running_stats:
            # With momentum 0 a layer only counts its batches.
            found.update(_full_names(prefix, ["num_batches_tracked"] if layer.momentum == 0 else layer._buffers))
    return found


def statistics_names(module: nn.Module) -> set[str]:
    return {name for prefix, layer in _norm_layers(module) for name in _full_names(prefix, layer._buffers)}


def _norm_layers(module: nn.Module) -> list[tuple[str, _NormBase]]:
    """The normalisation layers, by each of their names."""
    children = module.named_modules(remove_duplicate=False)
    return [(prefix, child) for prefix, child in children if isinstance(child, _NormBase)]


def running_statistics(module: nn.Module) -> Iterator[tuple[str, str, dict[str, torch.Tensor]]]:
    """Layers that update running statistics on the data of their rank: name, class, and buffers by full name."""
    for prefix, child in module.named_modules():
        # SyncBatchNorm has the statistics of all ranks.
        if not isinstance(child, _NormBase) or isinstance(child, nn.SyncBatchNorm) or child.momentum == 0:
            continue
        buffers = {name: buffer for name, buffer in child._buffers.items() if buffer is not None}
        if buffers:
            yield prefix, type(child).__name__, dict(zip(_full_names(prefix, buffers), buffers.values(), strict=True))


def _full_names(prefix: str, names: Iterable[str]) -> list[str]:
    return [f"{prefix}.{name}" if prefix else name for name in names]


def all_scalers() -> list[torch.amp.GradScaler]:
    """Every GradScaler in this process. Looks at all objects, which may take seconds: not for every step."""
    return [found for found in gc.get_objects() if issubclass(type(found), torch.amp.GradScaler)]


def largest_used_scaler(scalers: Iterable[torch.amp.GradScaler]) -> torch.amp.GradScaler | None:
    """The scaler with the largest scale among those that have scaled a loss; None if there is none."""
    used = [scaler for scaler in scalers if scaler.is_enabled() and scaler._scale is not None]
    return max(used, key=torch.amp.GradScaler.get_scale, default=None)


def calling_scaler() -> torch.amp.GradScaler | None:
    frame = frame_of(_SCALER_STEP)
    return None if frame is None else cast(torch.amp.GradScaler, frame.f_locals["self"])


def has_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``scaler.unscale_(optimizer)`` ran, and neither ``scaler.step()`` nor ``scaler.update()`` since."""
    states = scaler._per_optimizer_states if scaler.is_enabled() else {}
    return states.get(id(optimizer), {}).get("stage") is OptState.UNSCALED


def all_optimizers() -> list[torch.optim.Optimizer]:
    """Every optimizer in this process. Looks at all objects, which may take seconds: not for every step."""
    return [found for found in gc.get_objects() if issubclass(type(found), torch.optim.Optimizer)]
