"""The layout of flat tensors: a slot with a fixed offset for every named parameter, planned alike on all ranks.

It follows from the inventory, which describes all tensors by name: ranks with equal inventories have equal layouts.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from legacy_ddp import _torch as internals
from legacy_ddp._settings import Settings

SUPPORTED_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)
# Absent slots between two present slots are sent as zeros up to this size: cheaper than a second collective.
MAX_GAP_BYTES = 64 * 1024
MODULE = "class of the module"
# Their classes say nothing about a model.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LONGEST_FACT = 60  # characters about a tensor in an inventory
# The marks of parameters of which each rank has its own, as a test in a script: of fairseq (the first two), of
# DeepSpeed and Megatron, and of Tutel.
_OF_ONE_RANK: Mapping[str, Callable[[torch.Tensor], bool]] = {
    'hasattr(parameter, "expert")': lambda parameter: hasattr(parameter, "expert"),
    'hasattr(parameter, "base_expert")': lambda parameter: hasattr(parameter, "base_expert"),
    'not getattr(parameter, "allreduce", True)': lambda parameter: not getattr(parameter, "allreduce", True),
    'getattr(parameter, "skip_allreduce", False)': lambda parameter: bool(getattr(parameter, "skip_allreduce", False)),
}

Run = tuple[int, int]


@dataclass(frozen=True)
class Named:
    """A tensor and all its names, sorted; the first name is the name in messages and records."""

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        return self.names[0]


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
    """The slots of all parameters of a device and dtype, end to end."""

    device: torch.device
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    numel: int

    def runs(self, present: Sequence[bool], *, max_gap: int = 0) -> list[Run]:
        """Stretches ``(start, stop)`` of present slots, in elements; gaps of at most ``max_gap`` are included."""
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

    @cached_property
    def may_be_shared(self) -> bool:
        """Whether the memory of the bucket may be a segment: on CPU, with elements."""
        return self.device.type == "cpu" and self.numel > 0

    @cached_property
    def label(self) -> str:
        """Device and dtype as text, for example ``cpu float32``."""
        return f"{self.device} {str(self.dtype).removeprefix('torch.')}"

    @property
    def max_gap(self) -> int:
        """The largest gap, in elements, worth sending to save a second collective."""
        return MAX_GAP_BYTES // self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Buckets, and the inventory for the comparison of ranks.

    ``inventory`` describes the module, every parameter (frozen parameters, too) and every shared setting.
    ``buffer_size``: the maximum number of elements in a collective.
    """

    buckets: tuple[Bucket, ...]
    inventory: Mapping[str, str]
    buffer_size: int

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """All slots, bucket after bucket: the order of masks and of gradients everywhere."""
        return tuple(slot for bucket in self.buckets for slot in bucket.slots)

    @cached_property
    def is_on_cpu(self) -> bool:
        """Whether all buckets are on the CPU."""
        return all(bucket.device.type == "cpu" for bucket in self.buckets)

    @cached_property
    def shared_buckets(self) -> tuple[int, ...]:
        """The numbers of the buckets whose memory may be a segment."""
        return tuple(index for index, bucket in enumerate(self.buckets) if bucket.may_be_shared)

    @cached_property
    def fingerprint(self) -> int:
        """64 bits, equal on two ranks with equal inventories."""
        return inventory_digest(self.inventory)


def plan_layout(parameters: Sequence[Named], settings: Settings, module: Mapping[str, str] | None = None) -> Layout:
    """Give every trainable parameter a slot, in name order, in the bucket of its device and dtype.

    ``module``: the beginning of the inventory, see :func:`describe_module`.
    """
    for item in parameters:
        check_dense(item, kind="parameter")
    check_shared(parameters, settings)
    groups: dict[tuple[torch.device, torch.dtype], list[Named]] = {}
    for item in parameters:
        if item.tensor.requires_grad:
            check_trainable(item)
            groups.setdefault((item.tensor.device, gradient_dtype(item.tensor)), []).append(item)
    buckets = tuple(_plan_bucket(device, dtype, group) for (device, dtype), group in groups.items())
    inventory = {**(module or {}), **build_inventory(parameters, kind="parameter")}
    inventory.update({f"setting {name!r}": value for name, value in settings.shared.items()})
    return Layout(buckets, inventory, settings.buffer_size)


def _plan_bucket(device: torch.device, dtype: torch.dtype, parameters: Sequence[Named]) -> Bucket:
    slots = []
    offset = 0
    for item in parameters:
        tensor = item.tensor
        slots.append(Slot(item.name, tensor.shape, slot_stride(tensor), offset, tensor.numel()))
        offset += tensor.numel()
    return Bucket(device, dtype, tuple(slots), offset)


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


def check_dense(item: Named, *, kind: str) -> None:
    """Refuse a tensor without plain values of its own."""
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
    elif internals.is_packed(tensor):
        problem, step = f"is of dtype {tensor.dtype}, with several elements in a byte", "list it in ignore="
    else:
        return
    raise ValueError(f"{kind} {item.name!r} {problem}, expected a dense tensor; {step}")


def check_shared(parameters: Sequence[Named], settings: Settings) -> None:
    """Refuse parameters with the mark of values that each rank has for itself, such as those of its experts."""
    marked = {
        item.name: test for item in parameters for test, is_marked in _OF_ONE_RANK.items() if is_marked(item.tensor)
    }
    if not marked:
        return
    tests = " or ".join(dict.fromkeys(marked.values()))
    if settings.by_environment:
        advice = (
            f"give the other parameters to the call: [parameter for parameter in module.parameters() if not ({tests})]"
        )
    else:
        advice = f"leave them out with ignore=[name for name, parameter in module.named_parameters() if {tests}]"
    raise ValueError(
        f"parameters are marked as those of one rank: got {tests} for {len(marked)} of {len(parameters)} parameters, "
        f"first {next(iter(marked))!r}, expected parameters that all ranks share; {advice}; docs/migration.md, "
        "Experts, says who divides their gradients then; or delete the attribute, and all ranks share them"
    )


def check_trainable(item: Named) -> None:
    """Refuse a trainable parameter without a gradient to reduce."""
    tensor = item.tensor
    if not tensor.is_leaf:
        problem, step = "is computed from other tensors, expected a leaf", "pass the tensors that the optimizer holds"
    elif tensor.is_inference():
        problem = "was made in torch.inference_mode(), expected a tensor that autograd can train"
        step = "make the module outside of inference_mode(), or wrap copy.deepcopy(module)"
    elif gradient_dtype(tensor) not in SUPPORTED_DTYPES:
        supported = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES))
        problem = f"has gradients of dtype {gradient_dtype(tensor)}, expected one of {supported}"
        step = "freeze it or list it in ignore="
    else:
        return
    raise ValueError(f"parameter {item.name!r} {problem}; {step}")


def gradient_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of gradients of ``tensor``: its ``grad_dtype`` if set, else its own dtype."""
    return getattr(tensor, "grad_dtype", None) or tensor.dtype


def slot_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides for a gradient of ``tensor``: its own strides if dense, else the strides torch would choose."""
    # The strides of the parameter may overlap (expanded) or leave holes (sliced); the strides of empty_like never do.
    try:
        like = torch.empty_like(tensor, device="meta")
    except (RuntimeError, TypeError):  # a class with operations of its own may lack this one
        like = torch.empty_like(torch.empty_strided(tensor.shape, tensor.stride(), device="meta"))
    return tuple(like.stride())


def describe_module(module: nn.Module) -> dict[str, str]:
    """The class of ``module`` as a part of an inventory: two models may have parameters of equal names and shapes.

    Names of classes are compared, because classes made by torch (of parametrized modules, for example) are other
    objects in every process.
    """
    return {MODULE: _class_text(module)}


def _class_text(module: nn.Module) -> str:
    inside = internals.inside_of_compiled(module)
    name = type(inside).__qualname__
    if type(inside) not in _CONTAINERS:
        return name
    return f"{name}({', '.join(dict.fromkeys(map(_class_text, inside.children())))})"


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
    # Equal integers of another scale are other values, and no exchange changes a scale.
    if tensor.is_quantized:
        quantizer = internals.quantizer_of(tensor)
        is_short = len(quantizer) <= _LONGEST_FACT
        yield quantizer if is_short else f"scales and zero points {fingerprint(quantizer.encode()) % 2**64:016x}"
    if len(item.names) > 1:
        yield f"shared with {', '.join(item.names[1:])}"


def inventory_digest(inventory: Mapping[str, str]) -> int:
    """The fingerprint of an inventory, independent of its order."""
    return fingerprint(json.dumps(sorted(inventory.items())).encode())


def fingerprint(data: bytes) -> int:
    """A signed 64-bit number for ``data``: BLAKE2b (RFC 7693), equal on all machines."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """The same memory, each complex number as two real numbers."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def wire_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a bucket of ``dtype`` is sent and summed over a group, also over the tree: complex buckets
    unchanged, other buckets in ``reduce_dtype``.

    Without ``reduce_dtype`` fp16 is sent as fp32. For a mean in fp16, a division after the sum comes too late for large
    values (two ranks: 40000 + 40000 overflows), and a division before the sum makes small values 0 (6e-8 / 2).
    """
    if dtype.is_complex:
        return dtype
    if reduce_dtype is not None:
        return reduce_dtype
    return torch.float32 if dtype == torch.float16 else dtype


def sum_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """The real dtype in which shared memory adds a bucket of ``dtype``: at least fp32, and at least ``reduce_dtype``.

    Nothing is sent, so that a narrower ``reduce_dtype`` saves nothing. Complex numbers are added as pairs of their own
    precision.
    """
    if dtype.is_complex:
        return dtype.to_real()
    return torch.promote_types(torch.promote_types(dtype, torch.float32), reduce_dtype or dtype)
