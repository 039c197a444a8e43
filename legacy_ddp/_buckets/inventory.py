"""Tensors with their names: which tensors are accepted, and the inventory for the comparison of ranks."""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

SUPPORTED_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)


@dataclass(frozen=True)
class Named:
    """A tensor and all its names, sorted; the first name is the name in messages and records."""

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        return self.names[0]


def distinct(named: Iterable[tuple[str, torch.Tensor]], ignore: Collection[str] = ()) -> list[Named]:
    """Every tensor once, with all its names, sorted by name: the order of registration does not matter.

    A tensor is left out if any of its names is in ``ignore``.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    found = [Named(tuple(sorted(names[key])), tensor) for key, tensor in tensors.items()]
    return sorted(
        (item for item in found if not any(name in ignore for name in item.names)), key=lambda item: item.name
    )


def build_inventory(tensors: Sequence[Named], *, kind: str) -> dict[str, str]:
    """Describe each tensor by a text; ranks with equal tensors get equal texts.

    Devices are numbered in order of appearance: ``cuda:1`` on rank 1 and ``cuda:0`` on rank 0 are the same place.
    """
    seen: dict[torch.device, str] = {}
    inventory = {}
    for item in tensors:
        device = seen.setdefault(item.tensor.device, f"{item.tensor.device.type}#{len(seen)}")
        inventory[f"{kind} {item.name!r}"] = ", ".join(_facts(item, device, is_parameter=kind == "parameter"))
    return inventory


def _facts(item: Named, device: str, *, is_parameter: bool) -> Iterable[str]:
    tensor = item.tensor
    yield f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {device}"
    if is_parameter:
        yield f"trainable, strides {slot_stride(tensor)}" if tensor.requires_grad else "frozen"
        if gradient_dtype(tensor) != tensor.dtype:
            yield f"gradients {gradient_dtype(tensor)}"
    # An expanded tensor can only take the values of a tensor that is expanded in the same dimensions.
    if expanded := [i for i, size in enumerate(tensor.shape) if size > 1 and tensor.stride(i) == 0]:
        yield f"expanded in dimensions {expanded}"
    if len(item.names) > 1:
        yield f"shared with {', '.join(item.names[1:])}"


def inventory_digest(inventory: Mapping[str, str]) -> int:
    """The fingerprint of an inventory, independent of its order."""
    return fingerprint(json.dumps(sorted(inventory.items())).encode())


def fingerprint(data: bytes) -> int:
    """A signed 64-bit number for ``data``: BLAKE2b (RFC 7693), equal on all machines."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def gradient_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of gradients of ``tensor``: its ``grad_dtype`` if set, else its own dtype."""
    return getattr(tensor, "grad_dtype", None) or tensor.dtype


def slot_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides for a gradient of ``tensor``: its own strides if dense, else the strides torch would choose."""
    # The strides of the parameter may overlap (expanded) or leave holes (sliced); the strides of empty_like never do.
    return tuple(torch.empty_like(tensor, device="meta").stride())


def check_dense(item: Named, *, kind: str) -> None:
    """Refuse a tensor without plain values of its own.

    Raises:
        ValueError: the tensor is lazy, on the meta device, a DTensor, nested or sparse.
    """
    tensor = item.tensor
    if is_lazy(tensor):
        problem, step = "is not initialised yet (lazy module)", "run one forward pass before wrapping"
    elif hasattr(tensor, "device_mesh"):
        problem, step = "is a DTensor", "list it in ignore= or wrap a module with plain tensors"
    elif tensor.is_meta:
        problem, step = "is on the meta device", "materialise it with to_empty() before wrapping"
    elif tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else tensor.layout
        problem, step = f"has layout {layout}", "list it in ignore= or use a dense one"
    else:
        return
    raise ValueError(f"{kind} {item.name!r} {problem}, expected a dense tensor; {step}")


def check_trainable(item: Named) -> None:
    """Refuse a trainable parameter without a gradient to reduce.

    Raises:
        ValueError: the parameter is not a leaf, or its gradients are of a dtype other than :data:`SUPPORTED_DTYPES`.
    """
    tensor = item.tensor
    if not tensor.is_leaf:
        problem, step = "is computed from other tensors, expected a leaf", "pass the tensors that the optimizer holds"
    elif gradient_dtype(tensor) not in SUPPORTED_DTYPES:
        problem = f"has gradients of dtype {gradient_dtype(tensor)}, expected floating or complex of 16 bits or more"
        step = "freeze it or list it in ignore="
    else:
        return
    raise ValueError(f"parameter {item.name!r} {problem}; {step}")
