"""A flat tensor with a view per slot: which gradients are views, and which slots are referenced from outside.

The views are made once, and ``FlatBuffer.alias`` lends them to ``.grad`` again and again. Each view has a storage of
its own over the memory of the flat tensor, so that its reference counts belong to a single slot. Object identity alone
proves nothing: ``.to()``, ``.data =`` and ``set_()`` put other memory under the object. So address, shape, strides and
dtype are compared, too.

A script may keep its gradients in a tensor of its own, of which every ``.grad`` is a part, and read and clear them
there. A call then leaves its results there, too (:class:`ScriptMemory`).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_, le, not_
from typing import Any, NamedTuple, TypeGuard

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._memory.layout import Bucket, Slot
from legacy_ddp._memory.segment import SegmentPolicy

_VERSION = attrgetter("_version")
# The memory of every flat tensor that exists: the storage, and the addresses of its begin and its end.
_flat_memory: list[tuple[Any, int, int]] = []


def is_in_flat_tensor(grad: torch.Tensor) -> bool:
    """Whether ``grad`` lies in a flat tensor of this process: of this wrapper, another wrapper, or an earlier plan."""
    address = grad.data_ptr()
    return any(start <= address < stop and not storage.expired() for storage, start, stop in _flat_memory)


class _Made(NamedTuple):
    """The views, with what was read of them. Replaced as a whole, so that an exception leaves no half of a change.

    ``handles``: of the storages. ``replaced``: storages of earlier views, which may be in use elsewhere.
    """

    tensors: list[torch.Tensor]
    storages: list[torch.UntypedStorage]
    handles: list[int]
    guards: internals.TensorGuards
    replaced: list[torch.UntypedStorage]


def _made(
    tensors: list[torch.Tensor], storages: list[torch.UntypedStorage], replaced: list[torch.UntypedStorage]
) -> _Made:
    return _Made(tensors, storages, internals.storage_handles(storages), internals.TensorGuards(tensors), replaced)


class SlotViews:
    """A tensor per slot, of the parameter's shape, in the memory of ``flat``; an empty slot has memory of its own.

    ``made.tensors``: the views. ``segment``: the shared memory of ``flat``, None for ordinary memory.
    ``transport_view``: the memory of ``flat`` under a further storage. A thread of the transport may hold a sent tensor
    for milliseconds after the wait; the extra storage keeps this reference out of the counts of the slots.
    """

    def __init__(self, bucket: Bucket, policy: SegmentPolicy) -> None:
        self.flat, self.segment = policy.allocate(bucket)
        _note_memory(self.flat)
        self.transport_view = internals.under_own_storage(self.flat)
        self._slots = bucket.slots
        tensors = [self._make(slot) for slot in self._slots]
        self.made = made = _made(tensors, [view.untyped_storage() for view in tensors], [])
        self._addresses = list(map(torch.Tensor.data_ptr, tensors))
        # Counted with a second list that holds the tensors, because every later count is made with a second list, too.
        self._expected_refs = internals.ref_counts(tensors[:], made.storages[:], made.handles)
        (self._expected_storage_refs,) = _ref_counts_of_each([internals.under_own_storage(self.flat).untyped_storage()])
        self._result_versions: list[int] = []  # of the views, when the last call left its result

    def match_views(self, grads: Sequence[torch.Tensor | None]) -> list[bool]:
        """For each gradient (one per slot): whether the gradient is the view of its slot."""
        tensors = self.made.tensors
        if not self.made.guards.match(*tensors) or list(map(torch.Tensor.data_ptr, tensors)) != self._addresses:
            tensors = self._rebuild()
        return list(map(is_, grads, tensors))

    def matches_slots(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether each gradient is like its slot: dense, of the same shape, strides and dtype, and plain."""
        return not any(map(is_, grads, repeat(None))) and self.made.guards.match(*grads)

    def has_external_refs(self, is_view: Sequence[bool]) -> bool:
        """Whether anything refers to memory of a slot, besides gradients that are views (``is_view``, per slot)."""
        made = self.made
        if made.replaced:
            if any(counts != self._expected_storage_refs for counts in _ref_counts_of_each(made.replaced)):
                return True
            self.made = made = made._replace(replaced=[])
        idle = list(compress(made.tensors, map(not_, is_view)))
        now = internals.ref_counts(idle, made.storages[:], made.handles)
        return not all(map(le, now, self._expected_refs))

    def is_reusable(self) -> bool:
        """Whether nothing refers to memory of any slot. Rebuilds changed views."""
        return not self.has_external_refs(self.match_views([None] * len(self._slots)))

    def is_slot_unreferenced(self, index: int) -> bool:
        """Whether the slot can be written to unseen: nothing refers to its memory, ``.grad`` included."""
        one, made = slice(index, index + 1), self.made
        now = internals.ref_counts(made.tensors[one], made.storages[one], made.handles[one])
        return all(map(le, now, self._expected_refs)) and self._is_intact(index)

    def note_result(self) -> None:
        """Remember the versions of the views, at the end of a call."""
        self._result_versions = list(map(_VERSION, self.made.tensors))

    @property
    def has_result(self) -> bool:
        """Whether :meth:`note_result` was called."""
        return bool(self._result_versions)

    def result_version(self, index: int) -> int:
        """The version of a view at :meth:`note_result`."""
        return self._result_versions[index]

    @property
    def was_written(self) -> bool:
        """Whether a view was written to since :meth:`note_result`."""
        return self._result_versions != list(map(_VERSION, self.made.tensors))

    def _make(self, slot: Slot) -> torch.Tensor:
        if slot.numel == 0:
            return self.flat.new_empty_strided(slot.shape, slot.stride)
        return internals.under_own_storage(self.flat.as_strided(slot.shape, slot.stride, slot.offset))

    def _rebuild(self) -> list[torch.Tensor]:
        """Replace every changed view by a new view of its slot; the changed tensor stays with the user. The views.

        A detached gradient or a row of a gradient may still refer to the old storage, and so to memory of the slot.
        Therefore the old storage is kept, and its references are counted.
        """
        tensors, storages, _, _, replaced = self.made
        tensors, storages, replaced = tensors[:], storages[:], replaced[:]
        for index, slot in enumerate(self._slots):
            if not self._is_intact(index):
                replaced.append(storages[index])
                tensors[index] = self._make(slot)
                storages[index] = tensors[index].untyped_storage()
        self.made = _made(tensors, storages, replaced)
        return tensors

    def _is_intact(self, index: int) -> bool:
        """Whether the view is as it was made. In-place functions of a user may change all that is compared here."""
        view, slot = self.made.tensors[index], self._slots[index]
        return (
            type(view) is torch.Tensor
            and view.data_ptr() == self._addresses[index]
            and view.shape == slot.shape
            and view.stride() == slot.stride
            and view.dtype == self.flat.dtype
            and not (view.requires_grad or view.is_conj() or view.is_neg())
        )


def _ref_counts_of_each(storages: list[torch.UntypedStorage]) -> list[tuple[set[int], ...]]:
    return [internals.ref_counts([], [storage], internals.storage_handles([storage])) for storage in storages]


def _note_memory(flat: torch.Tensor) -> None:
    start = flat.data_ptr()
    _flat_memory[:] = [
        *(memory for memory in _flat_memory if not memory[0].expired()),
        (internals.weak_storage(flat), start, start + flat.nbytes),
    ]


def held_by_script(
    parameters: Sequence[torch.Tensor], indices: Sequence[int], given: Collection[int]
) -> frozenset[int]:
    """Those of ``indices`` whose gradient is a part of a larger tensor, or of memory from elsewhere, that is held.

    Backward, too, makes gradients as parts of one tensor, which nothing but ``.grad`` holds. ``given``: indices of
    gradients that the script has put into ``.grad``: there a reference to the part itself is enough.
    """
    parts = {index: grad for index in indices if _is_part(grad := parameters[index].grad)}
    distinct = {id(grad): grad for grad in parts.values()}
    on_storage = Counter(map(internals.storage_key, distinct.values()))
    held = {
        index
        for index, grad in parts.items()
        if not internals.is_memory_counted(grad)
        or internals.storage_use_count(grad) > on_storage[internals.storage_key(grad)]
    }
    others = [index for index in parts if index in given and index not in held]
    grad = None
    parts.clear()
    distinct.clear()  # these refer to gradients, too
    return frozenset(held.union(index for index in others if internals.is_grad_held(parameters[index])))


def _is_part(grad: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return grad is not None and internals.is_part(grad) and not is_in_flat_tensor(grad)


class TakenMemory:
    """The memory of results and of parameters: a result is written to no memory of another result, or of weights."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._ids: set[int] = set()
        self._of_results = _Extents()
        self._of_parameters: _Extents | None = None  # looked at when a gradient shares its memory

    def take(self, grad: torch.Tensor) -> bool:
        """Take the memory of ``grad`` for a result, if no part of it is taken."""
        if id(grad) in self._ids:  # one tensor may be the gradient of two parameters
            return False
        self._ids.add(id(grad))
        if internals.has_memory_alone(grad):
            return True
        if self._of_parameters is None:
            self._of_parameters = _Extents()
            for extent in sorted(map(_extent, self._parameters)):
                self._of_parameters.add(*extent)
        start, stop = _extent(grad)
        if self._of_parameters.overlaps(start, stop) or self._of_results.overlaps(start, stop):
            return False
        self._of_results.add(start, stop)
        return True


def can_hold_result(grad: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether every element of ``grad``, of the shape and dtype of ``view``, can be written to on its own."""
    is_plain = grad.layout is torch.strided and not (grad.is_inference() or grad.is_conj() or grad.is_neg())
    is_alike = (grad.shape, grad.dtype) == (view.shape, view.dtype)
    return is_plain and is_alike and (grad.stride() == view.stride() or not _overlaps_itself(grad))


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory, as in an expanded tensor."""
    last = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= last:
                return True
            last += (size - 1) * stride
    return False


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and behind the last byte."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


class _Extents:
    """Ranges of addresses that do not overlap, in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def overlaps(self, start: int, stop: int) -> bool:
        before = bisect_left(self._starts, stop)  # these begin before ``stop``, and the last of them ends last
        return before > 0 and self._stops[before - 1] > start

    def add(self, start: int, stop: int) -> None:
        """Add a range. Of ranges that overlap, as of shared weights, those that begin first are added first."""
        if self.overlaps(start, stop):
            self._stops[-1] = max(self._stops[-1], stop)
            return
        place = bisect_left(self._starts, start)
        self._starts.insert(place, start)
        self._stops.insert(place, stop)
