"""Which gradient lies where: named parameters -> a plan that every rank with the same names plans alike."""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.parameter import is_lazy

from legacy_ddp._settings import Settings

# Absent slots between two present ones travel along as zeros up to this size: cheaper than one collective more.
MAX_GAP_BYTES = 64 * 1024

SUPPORTED_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)

Run = tuple[int, int]


@dataclass(frozen=True)
class Slot:
    """The fixed place of one parameter's gradient in a flat buffer; ``offset`` and ``numel`` count elements."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """The slots of all parameters of one device and dtype, end to end."""

    device: torch.device
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    numel: int

    def runs(self, present: Sequence[bool], *, max_gap: int = 0) -> list[Run]:
        """Stretches ``(start, stop)`` of present slots, in elements; those at most ``max_gap`` apart become one."""
        if all(present):
            return [(0, self.numel)] if self.numel else []
        joined: list[Run] = []
        for slot, is_present in zip(self.slots, present, strict=True):
            if not is_present or slot.numel == 0:
                continue
            start, stop = slot.offset, slot.offset + slot.numel
            if joined and start - joined[-1][1] <= max_gap:
                start = joined.pop()[0]
            joined.append((start, stop))
        return joined

    @property
    def label(self) -> str:
        """``cpu float32``."""
        return f"{self.device} {str(self.dtype).removeprefix('torch.')}"

    @property
    def max_gap(self) -> int:
        """Elements of absent slots worth carrying instead of starting another collective."""
        return MAX_GAP_BYTES // self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Buckets, and the inventory that ranks compare.

    ``inventory`` says in words what every parameter is (frozen ones, too) and every setting that the ranks must share.
    ``buffer_size``: the most elements that one collective carries.
    """

    buckets: tuple[Bucket, ...]
    inventory: Mapping[str, str]
    buffer_size: int

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """All slots, bucket after bucket: the order of masks and of gradients everywhere."""
        return tuple(slot for bucket in self.buckets for slot in bucket.slots)

    @cached_property
    def fingerprint(self) -> int:
        """64 bits that are equal on two ranks if the inventories are."""
        return inventory_digest(self.inventory)


@dataclass(frozen=True)
class Named:
    """A tensor and all its names; the first of them in alphabetical order is what it is called."""

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        return self.names[0]


def cut_runs(runs: Iterable[Run], *, max_numel: int) -> list[Run]:
    """The same elements in stretches of at most ``max_numel``."""
    return [(cut, min(cut + max_numel, stop)) for start, stop in runs for cut in range(start, stop, max_numel)]


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


def plan_layout(parameters: Sequence[Named], settings: Settings) -> Layout:
    """Give every trainable parameter a slot, in name order, in the bucket of its device and dtype.

    Raises:
        ValueError: a parameter is not dense (see :func:`check_dense`), not a leaf, or of a dtype that no gradient has.
    """
    for item in parameters:
        check_dense(item, kind="parameter")
    trainable = [item for item in parameters if item.tensor.requires_grad]
    for item in trainable:
        _check_trainable(item)
    groups: dict[tuple[torch.device, torch.dtype], list[Named]] = {}
    for item in trainable:
        groups.setdefault((item.tensor.device, gradient_dtype(item.tensor)), []).append(item)
    buckets = tuple(_plan_bucket(device, dtype, group) for (device, dtype), group in groups.items())
    inventory = build_inventory(parameters, kind="parameter")
    inventory.update({f"setting {name!r}": value for name, value in settings.shared.items()})
    return Layout(buckets, inventory, settings.buffer_size)


def build_inventory(tensors: Sequence[Named], *, kind: str) -> dict[str, str]:
    """Say what each tensor is, in words that are equal on ranks whose tensors are alike.

    Devices are numbered in order of appearance: rank 1's ``cuda:1`` is the same place as rank 0's ``cuda:0``.
    """
    seen: dict[torch.device, str] = {}
    inventory = {}
    for item in tensors:
        tensor = item.tensor
        device = seen.setdefault(tensor.device, f"{tensor.device.type}#{len(seen)}")
        words = [f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {device}"]
        if kind == "parameter":
            words.append(f"trainable, strides {slot_stride(tensor)}" if tensor.requires_grad else "frozen")
            if gradient_dtype(tensor) != tensor.dtype:
                words.append(f"gradients {gradient_dtype(tensor)}")
        # No values fit into an expanded tensor but those of another one expanded alike.
        if expanded := [i for i, size in enumerate(tensor.shape) if size > 1 and tensor.stride(i) == 0]:
            words.append(f"expanded in dimensions {expanded}")
        if len(item.names) > 1:
            words.append(f"shared with {', '.join(item.names[1:])}")
        inventory[f"{kind} {item.name!r}"] = ", ".join(words)
    return inventory


def inventory_digest(inventory: Mapping[str, str]) -> int:
    """The fingerprint of an inventory, whatever its order."""
    return fingerprint(json.dumps(sorted(inventory.items())).encode())


def fingerprint(data: bytes) -> int:
    """A signed 64-bit number for ``data``: BLAKE2b (RFC 7693), equal on all machines."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def gradient_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of gradients of ``tensor``: its own, unless its ``grad_dtype`` says otherwise."""
    return getattr(tensor, "grad_dtype", None) or tensor.dtype


def slot_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides for a gradient of ``tensor``: its own where they are dense, else what torch would choose."""
    # A stride of the parameter itself may overlap (expanded) or leave holes (sliced); those of empty_like never do.
    return tuple(torch.empty_like(tensor, device="meta").stride())


def _plan_bucket(device: torch.device, dtype: torch.dtype, parameters: Sequence[Named]) -> Bucket:
    slots = []
    offset = 0
    for item in parameters:
        tensor = item.tensor
        slots.append(Slot(item.name, tensor.shape, slot_stride(tensor), offset, tensor.numel()))
        offset += tensor.numel()
    return Bucket(device, dtype, tuple(slots), offset)


def check_dense(item: Named, *, kind: str) -> None:
    """Refuse a tensor that has no plain values of its own.

    Raises:
        ValueError: it is lazy, on the meta device, a DTensor, nested or sparse.
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


def _check_trainable(item: Named) -> None:
    tensor = item.tensor
    if not tensor.is_leaf:
        problem, step = "is computed from other tensors, expected a leaf", "pass the tensors that the optimizer holds"
    elif gradient_dtype(tensor) not in SUPPORTED_DTYPES:
        problem = f"has gradients of dtype {gradient_dtype(tensor)}, expected floating or complex of 16 bits or more"
        step = "freeze it or list it in ignore="
    else:
        return
    raise ValueError(f"parameter {item.name!r} {problem}; {step}")
