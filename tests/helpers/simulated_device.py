"""A device in pure Python: tensors in memory of the host, with operations that count waits of the host.

:func:`install` gives this process the device type ``sim``. Every operation runs on a CPU tensor of the same memory.
Operations are issued in order, as on a stream. A result of a collective (:mod:`tests.helpers.simulated_group`) is there
only after its wait, as on an accelerator: :data:`device` notes operations that touch memory of a collective before.

The private names of torch are those of torch 2.13. Limits: one device, no streams, no sparse tensors.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import backend_registration

from tests.helpers.devices import place_in_library

NAME = "sim"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_aten = torch.ops.aten
# They look at shape and strides alone: the kernels of the CPU make views of any memory.
_VIEWS = {_aten.view.default, _aten.as_strided.default, _aten.unfold.default, _aten._reshape_alias.default}
_SETTERS = {_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset, _aten.set_.source_Tensor}
# They give a value, or a shape, to the host.
_WAITS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default, _aten.masked_select.default)


@dataclass
class InFlight:
    """A collective: the memory that it uses, its group, and whether the stream waits for its end.

    ``memory``: storages, with the addresses that are used. A storage that nobody holds is left out: no operation can
    touch its memory, which the collective keeps until its end, as NCCL does. Later tensors may have the same addresses.
    ``is_held``: the host does not run it before :meth:`SimulatedGroup.release`.
    """

    memory: list[tuple[StorageWeakRef, int, int]]
    group: object
    is_held: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    is_awaited: bool = False

    def uses(self, start: int, stop: int) -> bool:
        return any(start < end and begin < stop and not storage.expired() for storage, begin, end in self.memory)


class SimulatedDevice:
    """What torch asks a module of a device, and what a test looks at.

    ``host_waits``: by line of the library. ``races``: operations on memory of a collective that was not awaited.
    ``has_float64``: without it, a tensor of doubles is a TypeError, as on some accelerators. ``holds_copies``: copies
    to the host that it does not wait for run later, by :meth:`run_copies` or :meth:`synchronize`. ``lacks``: names of
    operations that the device does not have. ``recorded``: storages that were recorded for the one stream.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.host_waits: Counter[str] = Counter()
        self.races: list[str] = []
        self.has_float64 = True
        self.in_flight: list[InFlight] = []
        self.lacks: set[str] = set()
        self.holds_copies = False
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.recorded: set[int] = set()
        self.generator.manual_seed(0)

    def before(self, operation: Any, tensors: list[torch.Tensor], group: object = None) -> None:
        """An operation on ``tensors`` is issued: it runs after the collectives that were awaited.

        ``group``: of a collective, which also runs after all collectives of its group.
        """
        for collective in list(self.in_flight):
            if collective.is_awaited and collective.is_held:
                continue  # the operation runs at once, on values that mean nothing; copies to the host wait
            if collective.is_awaited:
                collective.done.wait()
                self.in_flight.remove(collective)
            elif collective.group is not group and any(collective.uses(*_extent(tensor)) for tensor in tensors):
                self.races.append(f"{operation} at {place_in_library()}")

    def wait_for_host(self) -> None:
        """The host reads a value: it waits for everything that was issued."""
        self.host_waits[place_in_library()] += 1
        for collective in self.in_flight:
            if collective.is_held:
                collective.done.wait()
        self.run_copies()

    def run_copies(self) -> None:
        copies, self.copies = self.copies, []
        for target, values in copies:
            target.copy_(values)

    def waits_of_the_library(self) -> int:
        return sum(count for place, count in self.host_waits.items() if place)

    # The interface of torch.<device>.

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device(self, _index: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self, _device: object = None) -> torch.Stream:
        kind = int(torch._C._autograd.DeviceType.PrivateUse1)
        return torch.Stream(stream_id=1, device_index=0, device_type=kind)

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, _device: object = None) -> None:
        self.wait_for_host()

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed + 1)  # other numbers than on the CPU

    manual_seed_all = manual_seed

    def get_rng_state(self, _device: object = None) -> torch.Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, _device: object = None) -> None:
        self.generator.set_state(state)


device = SimulatedDevice()


@cache
def install() -> SimulatedDevice:
    """Give this process the device type ``sim``; it cannot be taken away again."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=device)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run, "PrivateUse1")
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("convolution_overrideable", _convolve, "PrivateUse1")
    kernels.impl("convolution_backward_overrideable", _convolve_backward, "PrivateUse1")
    kernels.impl("_foreach_zero_", _zero_all, "PrivateUse1")
    kernels.impl("record_stream", _record, "PrivateUse1")
    _libraries.extend([library, kernels])
    torch.UntypedStorage.clone = _clone  # type: ignore[method-assign]  # copy.deepcopy() would ask for an allocator
    return device


_libraries: list[torch.library.Library] = []  # what they register ends with them


def _run(operation: Any, *args: Any, **kwargs: Any) -> Any:
    if operation in _VIEWS or operation in _SETTERS:
        return operation.redispatch(_CPU, *args, **kwargs)
    device.before(operation, [tensor for tensor in _tensors([*args, *kwargs.values()]) if tensor.device.type == NAME])
    if operation._schema.name in device.lacks:
        raise NotImplementedError(f"the device has no {operation}")
    if operation is _aten._copy_from.default:
        source, target, *non_blocking = args
        return _copy(source, target, waits=source.device != target.device and not any(non_blocking))
    if operation in _WAITS:
        device.wait_for_host()
    if operation is _aten.resize_.default:
        return _resize(*args)
    return _run_on_cpu(operation, args, kwargs)


def _copy(source: torch.Tensor, target: torch.Tensor, *, waits: bool) -> torch.Tensor:
    values = on_cpu(source)
    if waits:
        device.wait_for_host()
    if target.device.type == "cpu" and not waits:
        device.copies.append((target, values.clone()))
        if not device.holds_copies and not any(collective.is_held for collective in device.in_flight):
            device.run_copies()
    else:
        on_cpu(target).copy_(values)
    return target


def _convolve(*args: Any) -> Any:
    """torch asks a device outside of torch for a convolution of its own, and never the fallback."""
    return _run(_aten.convolution.default, *args)


def _convolve_backward(grad: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
    return _run(_aten.convolution_backward.default, grad, image, weight, [grad.shape[1]], *args)


def _zero_all(tensors: list[torch.Tensor]) -> None:
    """As on CUDA, no tensor has a new version."""
    device.before("_foreach_zero_", tensors)
    for tensor in tensors:
        on_cpu(tensor).zero_()


def _record(tensor: torch.Tensor, _stream: torch.Stream) -> None:
    device.recorded.add(tensor.untyped_storage().data_ptr())


def _run_on_cpu(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    originals: dict[int, torch.Tensor] = {}

    def alias(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor) or value.device.type != NAME:
            return value
        result = on_cpu(value)
        originals[id(result)] = value
        return result

    args = [_map(alias, value) for value in args]
    kwargs = {name: _map(alias, value) for name, value in kwargs.items() if name != "pin_memory"}
    types = _types_of_arguments(operation)
    if "generator" in types:
        if kwargs.get("generator"):  # of the CPU: the device has no others
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
        kwargs["generator"] = device.generator
    # torch gives a number in place of a tensor that was made of a number.
    args = [
        torch.tensor(value, device="cpu") if kind == "Tensor" and isinstance(value, int | float) else value
        for value, kind in zip(args, types.values(), strict=False)
    ]
    results = operation(*args, **kwargs)

    def back(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if (original := originals.get(id(value))) is None:
            return on_device(value)
        if original.shape != value.shape:  # an output that was resized
            _adopt(original, value)
        return original

    return _map(back, results)


@cache
def _types_of_arguments(operation: Any) -> dict[str, str]:
    return {argument.name: str(argument.type) for argument in operation._schema.arguments}


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """As ``tree_map()`` of torch, which is slow. Arguments and results are nested in lists and tuples alone."""
    return [_map(function, item) for item in value] if isinstance(value, list | tuple) else function(value)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same memory."""
    if tensor.device.type != NAME:
        return tensor
    storage = tensor.untyped_storage()
    shared = _storage(storage, torch.device("cpu")) if storage.nbytes() else torch.UntypedStorage(0)
    result = torch.empty(0, dtype=tensor.dtype, device="cpu")
    result.set_(shared, tensor.storage_offset(), tensor.shape, tensor.stride())
    result = torch._conj(result) if tensor.is_conj() else result
    return torch._neg_view(result) if tensor.is_neg() else result


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the device with the memory of a CPU tensor."""
    if not device.has_float64 and tensor.dtype in (torch.float64, torch.complex128):
        raise TypeError(f"the device has no {tensor.dtype}")
    return _adopt(torch._C._acc.create_empty_tensor((0,), tensor.dtype), tensor)


def _adopt(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    storage = _storage(source.untyped_storage(), torch.device(NAME, 0))
    operation = _aten.set_.source_Storage_storage_offset
    return operation.redispatch(_CPU, tensor, storage, source.storage_offset(), source.shape, source.stride())


def _storage(storage: torch.UntypedStorage, where: torch.device) -> torch.UntypedStorage:
    result: Any = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), where, storage.nbytes())
    result.memory = storage  # stays alive for as long as the result
    return result


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if storage.device.type != NAME:
        return torch.UntypedStorage(storage.nbytes(), device=storage.device).copy_(storage)
    values = torch.UntypedStorage(storage.nbytes(), device="cpu")
    if storage.nbytes():
        values.copy_(_storage(storage, torch.device("cpu")))
    return _storage(values, storage.device)


def _resize(tensor: torch.Tensor, size: Any, memory_format: Any = None) -> torch.Tensor:
    resized = torch.empty(size, dtype=tensor.dtype, device="cpu")
    old = on_cpu(tensor).flatten()[: resized.numel()]
    resized.view(-1)[: old.numel()] = old
    return _adopt(tensor, resized)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of ``tensor`` and after the last."""
    start = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size() * bool(tensor.numel())


def extents(tensors: list[torch.Tensor]) -> list[tuple[StorageWeakRef, int, int]]:
    """The memory of ``tensors``, as :class:`InFlight` has it."""
    return [(StorageWeakRef(tensor.untyped_storage()), *_extent(tensor)) for tensor in tensors]
