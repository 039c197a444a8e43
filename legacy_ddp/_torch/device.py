"""Kinds of devices: the only place that knows what CUDA, XPU, MPS or a backend of another project can do.

A device is asked through the module that torch has for its kind (``torch.get_device_module``). Nothing here makes a
context of a driver: a device that the script has not used is not asked.
"""

import os
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

_PINS_MEMORY = ("cuda", "xpu")  # copies from pinned memory need no wait of the host


def accelerator() -> torch.device | None:
    """The device that this process uses besides the CPU; None without one, or before its first use."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not _is_initialized(kind):
        return None
    return torch.device(kind.type, _module_of(kind).current_device() if kind.type != "mps" else 0)


def devices_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The devices of ``tensors`` but the CPU, in the same order on every rank."""
    return sorted({tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}, key=str)


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of the default generator of a device, as a tensor of bytes on the CPU."""
    # MPS has one device, and its functions take none.
    arguments = () if device.type == "mps" else (device,)
    state: torch.Tensor = _module_of(device).get_rng_state(*arguments)
    return state


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """The inverse of :func:`generator_state`."""
    arguments = () if device.type == "mps" else (device,)
    _module_of(device).set_rng_state(state, *arguments)


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the default generator of the current device of this kind."""
    _module_of(device).manual_seed(seed)


def is_capturing() -> bool:
    """Whether the current stream records a graph in place of running operations."""
    device = accelerator()
    if device is None:
        return False
    captures = getattr(_module_of(device), "is_current_stream_capturing", None)
    return captures is not None and bool(captures())


def host_tensor_for(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Integers on the CPU, in pinned memory where a copy to ``device`` then needs no wait."""
    return torch.tensor(values, device="cpu", pin_memory=device.type in _PINS_MEMORY)


@cache
def has_float64(kind: str) -> bool:
    """Whether tensors on devices of this kind can have doubles."""
    try:
        torch.empty(0, dtype=torch.float64, device=kind)
    except (TypeError, RuntimeError):
        return False
    return True


def where_doubles_are(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy on the CPU if its device has no doubles."""
    return tensor if has_float64(tensor.device.type) else tensor.cpu()


def read_scalars(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Real tensors of one element, on any device, as doubles. The host waits once, whatever their number and dtypes.

    They travel as bytes and become doubles on the CPU: a device may have no doubles, and an integer keeps its digits.
    """
    indices_of: dict[torch.dtype, list[int]] = {}
    for index, scalar in enumerate(scalars):
        indices_of.setdefault(scalar.dtype, []).append(index)
    dtypes = sorted(indices_of, key=lambda dtype: -dtype.itemsize)  # every dtype begins at a multiple of its size
    columns = [
        torch.stack([scalars[index].detach().reshape(()).to(scalars[0].device, non_blocking=True) for index in indices])
        for indices in (indices_of[dtype] for dtype in dtypes)
    ]
    data = torch.cat([column.view(torch.uint8) for column in columns]).cpu()
    found: dict[int, float] = {}
    for dtype, part in zip(dtypes, torch.split(data, [column.nbytes for column in columns]), strict=True):
        found.update(zip(indices_of[dtype], map(float, part.view(dtype).tolist()), strict=True))
    return [found[index] for index in range(len(scalars))]


def device_name(device: str) -> str:
    """The name of a device and of its model."""
    name = getattr(_module_of(torch.device(device)), "get_device_name", None)
    return device if name is None or device == "cpu" else f"{device} ({name(torch.device(device))})"


def library_facts(kinds: Iterable[str]) -> dict[str, str]:
    """Versions and settings of the libraries behind these kinds of devices."""
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


def _is_initialized(device: torch.device) -> bool:
    module = _module_of(device)
    return bool(getattr(module, "is_initialized", module.is_available)())


def _module_of(device: torch.device) -> Any:
    return torch.get_device_module(device)
