"""The bytes of a batch on the way to a rank: all state for a run besides the shared parameters."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from legacy_ddp.debug._cross_check.batch_plan import Classes, describe, names_in, rebuild

_ALIGNMENT = 64  # of torch's allocations: a tensor at another address may use another kernel


@dataclass(frozen=True)
class Parcel:
    """All state for a run besides the shared parameters: see :func:`pack`.

    ``generators``: states of the random generators. ``tensors``: by name, the parameters and buffers with values of the
    batch's rank alone.
    """

    batch: Any
    generators: Any
    tensors: Mapping[str, torch.Tensor]


def pack(batch: object, generators: Any, own: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One dimension of uint8 on the CPU: batch, generators and the tensors ``own``.

    A tensor keeps dtype, shape, strides and ``requires_grad``. Elements between the elements of a tensor travel with
    it.

    Raises:
        TypeError: see :func:`~legacy_ddp.debug._cross_check.batch_plan.describe`.
    """
    tensors: list[torch.Tensor] = []
    description = {
        "batch": describe(batch, "batch", tensors),
        "generators": describe(generators, "generators", tensors),
        "own": describe(dict(own), "own", tensors),
    }
    tensors = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
    text = json.dumps({**description, "tensors": [_layout(tensor) for tensor in tensors]}).encode("ascii")
    pieces = [_as_bytes_of(len(text).to_bytes(8, "little") + text), *map(_span, tensors)]
    return torch.cat([piece for data in pieces for piece in (data, _padding(data))])


def unpack(data: torch.Tensor, device: torch.device, classes: Classes) -> Parcel:
    """The inverse of :func:`pack`, in new memory. Tensors from an accelerator are put on ``device``.

    Raises:
        TypeError: the batch holds a class missing in ``classes``.
    """
    description, start = _description(data)
    tensors = []
    for layout in description["tensors"]:
        tensors.append(_tensor(data[start : start + layout["bytes"]], layout, device))
        start += _padded(layout["bytes"])
    return Parcel(
        rebuild(description["batch"], tensors, classes),
        rebuild(description["generators"], tensors, {}),
        rebuild(description["own"], tensors, {}),
    )


def unknown_classes(data: torch.Tensor, classes: Classes) -> list[str]:
    """The names of the classes in the batch of a parcel, without the names in ``classes``."""
    description, _ = _description(data)
    return sorted(names_in(description["batch"]) - set(classes))


def _description(data: torch.Tensor) -> tuple[dict[str, Any], int]:
    """The description in a parcel, and the place behind it."""
    length = int.from_bytes(bytes(data[:8].tolist()), "little")
    return json.loads(bytes(data[8 : 8 + length].tolist())), _padded(8 + length)


def _layout(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "bytes": _span_numel(tensor) * tensor.itemsize,
        "host": tensor.device.type == "cpu",
        "grad": tensor.requires_grad,
    }


def _span_numel(tensor: torch.Tensor) -> int:
    """The number of elements from the first to the last of ``tensor`` in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes from the first to the last element of ``tensor``, for any strides: expanded, sliced, overlapping."""
    return tensor.detach().as_strided((_span_numel(tensor),), (1,)).cpu().view(torch.uint8)


def _tensor(data: torch.Tensor, layout: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    span = data.clone().view(getattr(torch, layout["dtype"]))
    span = span if layout["host"] else span.to(device)
    return span.as_strided(layout["shape"], layout["strides"]).detach().requires_grad_(layout["grad"])


def _as_bytes_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def _padding(data: torch.Tensor) -> torch.Tensor:
    return torch.zeros(_padded(data.numel()) - data.numel(), dtype=torch.uint8, device="cpu")
