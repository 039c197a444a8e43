"""Kinds of devices: what CUDA, XPU, MPS or a backend of another project can do.

Nothing here makes a context of a driver on a device that the script has not used.
"""

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from legacy_ddp._torch.dispatch import has_own_dispatch

_PINS_MEMORY = ("cuda", "xpu")  # copies from pinned memory need no wait of the host
QUICK_NUMEL = 2**16  # tensors of at most this size are read at once
_MAX_WAITING = 256  # of a Reader: a script may never call read()
_module_of: Callable[[torch.device], Any] = torch.get_device_module


def accelerator() -> torch.device | None:
    """The device that this process uses besides the CPU; None without one, or before its first use."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return None
    module = _module_of(kind)
    if not getattr(module, "is_initialized", module.is_available)():
        return None
    return torch.device(kind.type, module.current_device() if kind.type != "mps" else 0)


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The devices of ``tensors`` except the CPU, in the same order on every rank."""
    return sorted({tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}, key=str)


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of the default generator of a device, as a tensor of bytes on the CPU."""
    state: torch.Tensor = _module_of(device).get_rng_state(device)
    return state


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    _module_of(device).set_rng_state(state, device)


def seed_generator(device: torch.device, seed: int) -> None:
    _module_of(device).manual_seed(seed)


def is_capturing() -> bool:
    """Whether the current stream records operations in a graph and does not run them."""
    device = accelerator()
    if device is None:
        return False
    captures = getattr(_module_of(device), "is_current_stream_capturing", None)
    return captures is not None and bool(captures())


def current_stream(device: torch.device) -> Any:
    """The stream on which operations are issued now; None for a device without streams."""
    ask = getattr(_module_of(device), "current_stream", None)
    return None if ask is None else ask(device)


def hold_for_current_stream(tensors: Iterable[torch.Tensor]) -> None:
    """Do not use the memory of ``tensors`` again, also after they are freed, until the operations that were issued on
    the current stream have run. Needed for tensors that were made on another stream."""
    for tensor in tensors:
        if _records_streams(tensor.device):
            tensor.record_stream(current_stream(tensor.device))


@cache
def _records_streams(device: torch.device) -> bool:
    """Whether the allocator of the device waits for streams. False on the CPU."""
    try:
        torch.empty(1, device=device).record_stream(current_stream(device))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def host_tensor_for(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Integers on the CPU, for a copy to ``device`` that the host does not wait for."""
    return torch.tensor(values, device="cpu", pin_memory=device.type in _PINS_MEMORY)


def host_numbers(count: int, device: torch.device) -> torch.Tensor:
    """Integers of 32 bits on the CPU, for a copy from ``device`` that the host does not wait for."""
    return torch.zeros(count, dtype=torch.int32, device="cpu", pin_memory=device.type in _PINS_MEMORY)


def synchronize(device: torch.device) -> None:
    """Wait until everything that was issued on the device has run."""
    synchronize = getattr(_module_of(device), "synchronize", None)
    if synchronize is None:  # of a backend of another project: reading a value waits, too
        torch.zeros(1, device=device).item()
    else:
        synchronize(*(() if device.type == "mps" else (device,)))  # MPS has one device, and its function takes none


@cache
def has_float64(kind: str) -> bool:
    try:
        torch.empty(0, dtype=torch.float64, device=kind)
    except (TypeError, RuntimeError):
        return False
    return True


def where_doubles_are(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy on the CPU if its device has no doubles."""
    return tensor if has_float64(tensor.device.type) else tensor.cpu()


def read_scalars(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Real tensors of one element, on any devices, as numbers. The host waits once."""
    indices_of: dict[torch.dtype, list[int]] = {}
    for index, scalar in enumerate(scalars):
        indices_of.setdefault(scalar.dtype, []).append(index)
    columns = [
        torch.stack([scalars[index].detach().reshape(()).to(scalars[0].device, non_blocking=True) for index in indices])
        for indices in indices_of.values()
    ]
    found: dict[int, float] = {}
    for indices, numbers in zip(indices_of.values(), read_vectors(columns), strict=True):
        found.update(zip(indices, numbers, strict=True))
    return [found[index] for index in range(len(scalars))]


def read_vectors(vectors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Real tensors of one dimension, on any devices, as numbers. The host waits once."""
    away = [index for index, vector in enumerate(vectors) if vector.device.type != "cpu"]
    read = {index: vector.tolist() for index, vector in enumerate(vectors) if vector.device.type == "cpu"}
    if away:
        # As bytes, because a device may have no doubles, and integers stay int. Sorted by size, so that every dtype
        # begins at a multiple of its size.
        away.sort(key=lambda index: -vectors[index].dtype.itemsize)
        place = vectors[away[0]].device
        data = torch.cat([vectors[index].to(place, non_blocking=True).view(torch.uint8) for index in away]).cpu()
        parts = torch.split(data, [vectors[index].nbytes for index in away])
        read |= {index: part.view(vectors[index].dtype).tolist() for index, part in zip(away, parts, strict=True)}
    return [read[index] for index in range(len(vectors))]


def values_of(grad: torch.Tensor) -> torch.Tensor:
    """The elements of a gradient, of a sparse one only those that it holds."""
    return grad.coalesce().values() if grad.is_sparse else grad


def has_nonzero(grad: torch.Tensor) -> bool:
    values = values_of(grad)
    # In pieces: the first is mostly enough, and any() copies its input as booleans. The sum is much quicker than any(),
    # but may be zero by chance.
    pieces = values.chunk(-(-values.numel() // QUICK_NUMEL)) if values.numel() > QUICK_NUMEL else (values,)
    return any(bool(piece.sum()) or bool(piece.any()) for piece in pieces)


def have_nonzero(grads: Iterable[torch.Tensor]) -> bool:
    """Whether any of the gradients has an element that is not zero. The host waits once."""
    away = []
    for grad in grads:
        if grad.device.type != "cpu":
            away.append(values_of(grad))
        elif has_nonzero(grad):
            return True
    return bool(away) and any(read_scalars([values.any() for values in away]))


def which_nonzero(grads: Collection[torch.Tensor]) -> list[bool]:
    """For each gradient, whether any element is not zero. The host waits once."""
    away = [values_of(grad).any() for grad in grads if grad.device.type != "cpu"]
    read = iter(read_scalars(away) if away else ())
    return [has_nonzero(grad) if grad.device.type == "cpu" else bool(next(read)) for grad in grads]


class Reader:
    """Numbers on devices that several callers need: the host waits once for all of them."""

    def __init__(self) -> None:
        # What read() will read, with the functions to call.
        self.waiting: list[tuple[Sequence[torch.Tensor], Callable[[list[list[Any]]], object]]] = []
        self._streams: dict[torch.device, list[Any]] = {}  # that compute the vectors

    def add(self, vectors: Sequence[torch.Tensor], take: Callable[[list[list[Any]]], object]) -> None:
        """Let the next :meth:`read` call ``take`` with the numbers in ``vectors``, in the order of the calls of
        :meth:`add`. If nothing is on a device, call it now."""
        away = [vector for vector in vectors if vector.device.type != "cpu"]
        for vector in away:
            vector.data_ptr()  # raises for a tensor of a function transform
        if any(map(has_own_dispatch, away)):
            raise TypeError("the tensors have no memory: got tensors of a compiler, expected tensors with a storage")
        self.waiting.append((vectors, take))
        for device in {vector.device for vector in away}:
            if (stream := current_stream(device)) not in self._streams.setdefault(device, []):
                self._streams[device].append(stream)
        # In a capture the device raises now; a later read would find no numbers.
        if not self._streams or len(self.waiting) >= _MAX_WAITING or is_capturing():
            self.read()

    def add_scalar(self, scalar: torch.Tensor, take: Callable[[float], object]) -> None:
        """As :meth:`add`, for a real tensor of one element."""
        self.add([scalar.detach().reshape(1)], lambda numbers: take(numbers[0][0]))

    def read(self) -> None:
        """Read all that was added since the last :meth:`read`. If nothing was, the host does not wait."""
        waiting, self.waiting = self.waiting, []
        streams, self._streams = self._streams, {}
        for device, found in streams.items():
            for stream in found:
                if stream is not None and stream != current_stream(device):
                    current_stream(device).wait_stream(stream)
        numbers = iter(read_vectors([vector for vectors, _ in waiting for vector in vectors]))
        for vectors, take in waiting:
            take(list(islice(numbers, len(vectors))))

    def clear(self) -> None:
        """Forget all that was added since the last :meth:`read`."""
        self.waiting, self._streams = [], {}


def device_name(device: str) -> str:
    name = getattr(_module_of(torch.device(device)), "get_device_name", None)
    return device if name is None or device == "cpu" else f"{device} ({name(torch.device(device))})"


def library_facts(kinds: Iterable[str]) -> dict[str, str]:
    """Versions and settings of the libraries for these kinds of devices."""
    if "cuda" not in kinds:
        return {}
    return {
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none",  # type: ignore[no-untyped-call]
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
        "cudnn.deterministic": str(torch.backends.cudnn.deterministic),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "not set"),
    }
