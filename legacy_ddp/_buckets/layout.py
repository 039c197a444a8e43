"""The layout: a slot with a fixed offset for every named parameter, planned alike on all ranks with the same names."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from legacy_ddp._buckets.inventory import (
    Named,
    build_inventory,
    check_dense,
    check_trainable,
    gradient_dtype,
    inventory_digest,
    slot_stride,
)
from legacy_ddp._settings import Settings

# Absent slots between two present slots are sent as zeros up to this size: cheaper than a second collective.
MAX_GAP_BYTES = 64 * 1024

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

    @property
    def may_be_shared(self) -> bool:
        """Whether the memory of the bucket may be a segment: on CPU, with elements."""
        return self.device.type == "cpu" and self.numel > 0

    @property
    def label(self) -> str:
        """``cpu float32``."""
        return f"{self.device} {str(self.dtype).removeprefix('torch.')}"

    @property
    def max_gap(self) -> int:
        """The largest gap, in elements, worth sending to save a second collective."""
        return MAX_GAP_BYTES // self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Buckets, and the inventory for the comparison of ranks.

    ``inventory`` describes every parameter (frozen parameters, too) and every shared setting.
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


def cut_runs(runs: Iterable[Run], *, max_numel: int) -> list[Run]:
    """The same elements in stretches of at most ``max_numel``."""
    return [(cut, min(cut + max_numel, stop)) for start, stop in runs for cut in range(start, stop, max_numel)]


def plan_layout(parameters: Sequence[Named], settings: Settings) -> Layout:
    """Give every trainable parameter a slot, in name order, in the bucket of its device and dtype.

    Raises:
        ValueError: a parameter is not usable, as :func:`check_dense` and :func:`check_trainable` say.
    """
    for item in parameters:
        check_dense(item, kind="parameter")
    groups: dict[tuple[torch.device, torch.dtype], list[Named]] = {}
    for item in parameters:
        if item.tensor.requires_grad:
            check_trainable(item)
            groups.setdefault((item.tensor.device, gradient_dtype(item.tensor)), []).append(item)
    buckets = tuple(_plan_bucket(device, dtype, group) for (device, dtype), group in groups.items())
    inventory = build_inventory(parameters, kind="parameter")
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
