"""The flat tensor of a bucket: packing gradients into slots, and giving the slots to ``.grad``. No communication.

A gradient is not copied if it already is the view of its slot. Safety comes from reference counts: if anything besides
these gradients refers to memory of the flat tensor (a gradient kept by the user, two gradients swapped by hand, a
transposed gradient), the call packs into a fresh flat tensor and leaves the old memory to its other holders.

The views are made once, and ``FlatBuffer.alias`` lends them to ``.grad`` again and again. Each view has a storage of
its own over the memory of the flat tensor, so that its reference counts belong to a single slot. Object identity alone
proves nothing: ``.to()``, ``.data =`` and ``set_()`` put other memory under the object. So address, shape, strides and
dtype are compared, too.
"""

import threading
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import attrgetter, is_, le, not_
from typing import NamedTuple

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._errors import GradientError
from legacy_ddp._memory.layout import Bucket, Run, Slot, wire_dtype
from legacy_ddp._memory.script_memory import TakenMemory, can_hold_result, held_by_script, note_flat_tensor
from legacy_ddp._memory.segment import SegmentPolicy
from legacy_ddp._settings import Settings
from legacy_ddp._torch import device as devices

ABSENT, DENSE, SPARSE = 0, 1, 2  # kinds of gradient; SPARSE + sparse_dim for a sparse gradient
ZEROS = -1  # of a result alone: no rank has a gradient, and all of them get zeros
_VERSION = attrgetter("_version")


def kinds_of(grads: Sequence[torch.Tensor | None]) -> list[int]:
    """The kind of each gradient: ABSENT, DENSE, or SPARSE + sparse_dim."""
    return [
        ABSENT if grad is None else DENSE if grad.layout is torch.strided else SPARSE + grad.sparse_dim()
        for grad in grads
    ]


def is_plain(bucket: Bucket, slot: Slot, grad: torch.Tensor) -> bool:
    """Whether ``grad`` is a plain dense gradient exactly as planned."""
    return (
        grad.layout is torch.strided
        and grad.device == bucket.device
        and grad.dtype == bucket.dtype
        and grad.shape == slot.shape
        and grad.stride() == slot.stride
        and not (grad.requires_grad or grad.is_inference())
    )


def check_gradient(bucket: Bucket, slot: Slot, grad: torch.Tensor) -> None:
    """Refuse a gradient unusable for reduction."""
    if grad.requires_grad:
        problem = "requires grad: got create_graph=True, expected a plain gradient; detach it before all_reduce()"
    elif grad.layout not in (torch.strided, torch.sparse_coo):
        problem = f"has layout {grad.layout}, expected strided or sparse_coo; convert it before all_reduce()"
    elif grad.shape != slot.shape:
        problem = (
            f"has shape {tuple(grad.shape)}, expected {tuple(slot.shape)}; assign a gradient of the parameter's shape"
        )
    elif grad.dtype != bucket.dtype:
        problem = f"has dtype {grad.dtype}, expected {bucket.dtype}; cast it, or set grad_dtype on the parameter"
    else:
        return
    raise GradientError(f"grad of {slot.name!r} {problem}", parameter=slot.name)


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
        note_flat_tensor(self.flat)
        self.transport_view = internals.under_own_storage(self.flat)
        self._slots = bucket.slots
        tensors = [self._make(slot) for slot in self._slots]
        self.made = made = _made(tensors, [view.untyped_storage() for view in tensors], [])
        self._addresses = list(map(torch.Tensor.data_ptr, tensors))
        self._strides = list(map(torch.Tensor.stride, tensors))  # torch 2.8: of a dimension of one element always 1
        # Counted with a second list that holds the tensors, because every later count is made with a second list, too.
        self._expected_refs = internals.ref_counts(tensors[:], made.storages[:], made.handles)
        (self._expected_storage_refs,) = _ref_counts_of_each([internals.under_own_storage(self.flat).untyped_storage()])
        self.result_versions: list[int] = []  # of the views, when the last call left its result

    def match_views(self, grads: Sequence[torch.Tensor | None]) -> list[bool]:
        """For each gradient (one per slot): whether the gradient is the view of its slot."""
        tensors = self.made.tensors
        if not self.made.guards.match(*tensors) or list(map(torch.Tensor.data_ptr, tensors)) != self._addresses:
            tensors = self._rebuild()
        return list(map(is_, grads, tensors))

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

    def is_slot_unreferenced(self, index: int) -> bool:
        """Whether the slot can be written to unseen: nothing refers to its memory, ``.grad`` included."""
        one, made = slice(index, index + 1), self.made
        now = internals.ref_counts(made.tensors[one], made.storages[one], made.handles[one])
        return all(map(le, now, self._expected_refs)) and self._is_intact(index)

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
            and view.stride() == self._strides[index]
            and view.dtype == self.flat.dtype
            and not (view.requires_grad or view.is_conj() or view.is_neg())
        )


def _ref_counts_of_each(storages: list[torch.UntypedStorage]) -> list[tuple[set[int], ...]]:
    return [internals.ref_counts([], [storage], internals.storage_handles([storage])) for storage in storages]


class FlatBuffer:
    """The flat tensor of a bucket, shape (bucket.numel,), and the gradients in its slots."""

    def __init__(self, bucket: Bucket, settings: Settings, policy: SegmentPolicy) -> None:
        self.bucket = bucket
        self._policy = policy
        self.as_views = settings.gradient_as_bucket_view
        self.wire: torch.Tensor | None = None
        self._is_for_hook = settings.comm_hook is not None
        self._wire_dtype = bucket.dtype if self._is_for_hook else wire_dtype(bucket.dtype, settings.reduce_dtype)
        self.may_need_wire = self._is_for_hook or self._wire_dtype != bucket.dtype  # :meth:`make_wire` may do something
        self._views: SlotViews | None = None  # made by the first backward or call
        self.spare: SlotViews | None = None  # kept from an earlier call, if the user keeps a gradient of every call
        self._views_lock = threading.Lock()  # backward passes may run in several threads
        self.moves_enabled = True  # False while the flat tensor holds values that are still needed
        self.is_view = [False] * len(bucket.slots)  # whether the gradient is the view of its slot, as of look_at()
        self._was_view = self.is_view  # the same when the call began: pack() may move all gradients
        self.kinds: Sequence[int] = ()  # of the gradients, as of look_at(); all absent if they are not used
        self._held: frozenset[int] = frozenset()  # the slots with a result of the last call in memory of the script
        # Identity and version of the gradient that the last call left for each slot, where some of them are not views.
        self._result_identities: list[object] = []
        self._result_versions: list[int] = []
        self._zeros: frozenset[int] = frozenset()  # the slots to which the last call gave zeros

    @property
    def views(self) -> SlotViews:
        """The slots as tensors, with their flat tensor; made on first use."""
        if (views := self._views) is not None:
            return views
        with self._views_lock:
            if self._views is None:
                with torch.inference_mode(False):  # a backward inside that mode may be the first
                    self._views = SlotViews(self.bucket, self._policy)
            return self._views

    @property
    def flat(self) -> torch.Tensor:
        return (self._views or self.views).flat

    @property
    def payload(self) -> torch.Tensor:
        """The tensor for collectives: the flat tensor's memory, or its copy in the dtype for sending."""
        return self.views.transport_view if self.wire is None else self.wire

    def look_at(self, grads: Sequence[torch.Tensor | None], *, are_used: bool) -> None:
        """Note which gradients (one per slot) are the views of their slots; if they are used, refuse unusable ones."""
        views, count = self._views, len(grads)
        self.is_view = self._was_view = [False] * count if views is None else views.match_views(grads)
        self.kinds = [ABSENT] * count
        if not are_used:
            return
        # All at once: every gradient is there and like its slot, in shape, strides and dtype, and plain.
        if all(self.is_view) or (
            views is not None and not any(map(is_, grads, repeat(None))) and views.made.guards.match(*grads)
        ):
            self.kinds = [DENSE] * count
            return
        for slot, grad, is_view in zip(self.bucket.slots, grads, self.is_view, strict=True):
            if grad is not None and not is_view:
                check_gradient(self.bucket, slot, grad)
        self.kinds = kinds_of(grads)

    def pack(self, grads: Sequence[torch.Tensor | None], *, copy: bool) -> None:
        """Copy the dense gradients to their slots, except views; None and sparse gradients are skipped.

        No ``.grad`` can see the writes. ``copy=False`` only makes the memory available.
        """
        views = self._views or self.views
        if views.has_external_refs(self.is_view) or not self._policy.fits(self.bucket, views.segment):
            views = self._change_memory()
        else:
            self.spare = None
        if not copy or all(self.is_view):
            return
        slots: list[torch.Tensor] = []
        loose: list[torch.Tensor] = []
        for view, grad, is_view in zip(views.made.tensors, grads, self.is_view, strict=True):
            if not is_view and grad is not None and grad.layout is torch.strided:
                slots.append(view)
                loose.append(grad)
        if loose:
            internals.foreach_copy(slots, loose)
            if self.bucket.device.type != "cpu":  # backward may have run on another stream
                devices.hold_for_current_stream(loose)

    def move_to_slot(self, index: int, parameter: torch.Tensor) -> torch.Tensor | None:
        """Move the new gradient to its slot during backward, if nothing else refers to gradient or slot.

        Returns the gradient in the slot. Otherwise the gradient keeps its memory until the call packs the bucket.
        """
        if not self.moves_enabled or not internals.is_only_in_grad(parameter):
            return None
        grad = parameter.grad
        if grad is None or not is_plain(self.bucket, self.bucket.slots[index], grad):
            return None
        try:
            views = self.views
        except (RuntimeError, MemoryError, OSError):  # no memory: the call reports the failure, on all ranks
            return None
        if not views.is_slot_unreferenced(index):
            return None
        moved = views.made.tensors[index].copy_(grad)
        parameter.grad = moved
        return moved

    def make_wire(self, *, has_peers: bool) -> None:
        """Allocate the copy for sending, if needed: for a different dtype, or for a hook to write to. Else drop it."""
        is_sent = has_peers and not self._policy.carries(self.bucket)
        if not (self._is_for_hook or (is_sent and self._wire_dtype != self.bucket.dtype)):
            self.wire = None
            return
        size = self.bucket.numel * self._wire_dtype.itemsize
        if self.wire is None or self.wire.untyped_storage().nbytes() < size:  # a hook may have freed it
            self.wire = torch.empty(self.bucket.numel, dtype=self._wire_dtype, device=self.bucket.device)

    def release_memory(self) -> None:
        """Drop all memory; the next call allocates new memory."""
        self._views = self.spare = self.wire = None
        self.is_view = [False] * len(self.is_view)

    def holds_only_views(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether every packed gradient was the view left by the last call. Writes to the views do not matter."""
        return all(
            is_view or grad is None or slot.numel == 0
            for slot, grad, is_view in zip(self.bucket.slots, grads, self._was_view, strict=True)
        )

    @property
    def will_change_memory(self) -> bool:
        """Whether :meth:`pack` would take another flat tensor. For use while no ``.grad`` is a view of a slot."""
        views = self.views
        has_refs = views.has_external_refs([False] * len(self.bucket.slots))
        return has_refs or not self._policy.fits(self.bucket, views.segment)

    def is_last_result(self, index: int, grad: torch.Tensor) -> bool:
        """Whether ``grad`` is the object left for the slot by the last call. Writes to the object do not matter."""
        if self._result_identities:
            return internals.identity(grad) is self._result_identities[index]
        views = self._views
        return views is not None and bool(views.result_versions) and grad is views.made.tensors[index]

    @property
    def was_written(self) -> bool:
        """Whether a gradient was written to since the last call left its result."""
        return self.views.result_versions != list(map(_VERSION, self.views.made.tensors))

    def zero(self, kinds: Sequence[int], *, runs: Sequence[Run], flat: torch.Tensor | None = None) -> None:
        """Clear the slots inside ``runs`` (not cut, in order) without a dense gradient of this rank.

        ``flat``: a tensor like the flat tensor, to clear instead of the flat tensor.
        """
        flat = self.flat if flat is None else flat
        for slot, kind in zip(self.bucket.slots, kinds, strict=True):
            if kind != DENSE and _inside(runs, slot.offset):
                flat[slot.offset : slot.offset + slot.numel].zero_()

    def alias(self, parameters: Sequence[torch.Tensor], kinds: Sequence[int], given: Collection[int] | None) -> None:
        """Give every parameter its reduced gradient: a view of the flat tensor, a copy, or None if absent.

        A gradient in memory of the script, which is looked for unless ``given`` is None, gets its result there.
        """
        views = self._views or self.views
        zeros = frozenset[int]()
        if ZEROS in kinds:
            zeros = frozenset(index for index, kind in enumerate(kinds) if kind == ZEROS)
            for index in zeros:
                views.made.tensors[index].zero_()  # the sum left out the slot, so that it may hold anything
            kinds = [DENSE if kind == ZEROS else kind for kind in kinds]
        self._held = frozenset() if given is None and not self._held else self._find_held(parameters, given)
        if not self.as_views or self._held:
            self._copy_out(views.made.tensors, parameters, kinds)
        elif not all(self.is_view) or kinds.count(DENSE) < len(kinds):
            for view, parameter, kind, is_view in zip(views.made.tensors, parameters, kinds, self.is_view, strict=True):
                if kind == DENSE and not is_view:
                    parameter.grad = view
                elif kind == ABSENT:
                    parameter.grad = None
        views.result_versions = list(map(_VERSION, views.made.tensors))
        self._zeros = zeros
        self._result_identities, self._result_versions = [], []
        if not self.as_views or self._held or max(kinds, default=ABSENT) >= SPARSE:
            grads = [parameter.grad for parameter in parameters]
            self._result_identities = [None if grad is None else internals.identity(grad) for grad in grads]
            self._result_versions = [0 if grad is None else grad._version for grad in grads]

    def _find_held(self, parameters: Sequence[torch.Tensor], given: Collection[int] | None) -> frozenset[int]:
        """The slots with a gradient of the script: found now, or in an earlier call, whose result it holds."""
        if not self.as_views:
            return frozenset()
        given, indices = set(given or ()), []
        for index, parameter in enumerate(parameters):
            if (grad := parameter.grad) is None or self.is_view[index]:
                continue
            if self.is_last_result(index, grad):
                if index not in self._held:
                    continue
                given.add(index)
            indices.append(index)
        grad = None  # it would count as a holder
        return held_by_script(parameters, indices, given)

    def _copy_out(
        self, views: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], kinds: Sequence[int]
    ) -> None:
        """Write the results to memory outside of the flat tensor, with ``as_views`` only to that of the script."""
        slots: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        taken = TakenMemory(parameters)
        for index, (view, parameter, kind) in enumerate(zip(views, parameters, kinds, strict=True)):
            if kind == ABSENT:
                parameter.grad = None
            elif kind == DENSE and not self.is_view[index]:
                grad, is_copied = parameter.grad, not self.as_views or index in self._held
                if not (is_copied and grad is not None and can_hold_result(grad, view) and taken.take(grad)):
                    grad = view if self.as_views else torch.empty_like(view)
                parameter.grad = grad
                if grad is not view:
                    slots.append(view)
                    targets.append(grad)
        if slots:
            internals.foreach_copy(targets, slots)

    def _change_memory(self) -> SlotViews:
        """Leave the memory to its holders, and take the spare if nothing refers to it, else fresh memory.

        In a loop that keeps a gradient of every call, for example in a loop variable, the spare is free again. Writing
        to the spare takes half the time of writing to fresh memory.
        """
        free = self.spare
        if (
            free is None
            or not self._policy.fits(self.bucket, free.segment)
            or free.has_external_refs(free.match_views([None] * len(self.is_view)))
        ):
            free = SlotViews(self.bucket, self._policy)
        self._views, self.spare, self.is_view = free, self._views, [False] * len(self.is_view)
        return free


@dataclass(frozen=True, slots=True)
class SlotResult:
    """The gradient that the last call has left for a slot of a buffer; as :class:`LastResult`."""

    buffer: FlatBuffer
    index: int

    def is_in(self, grad: torch.Tensor) -> bool:
        return self.buffer.is_last_result(self.index, grad)

    @property
    def is_zeros(self) -> bool:
        return self.index in self.buffer._zeros

    @property
    def version(self) -> int:
        return (self.buffer._result_versions or self.buffer.views.result_versions)[self.index]

    @property
    def view(self) -> torch.Tensor | None:
        if self.buffer._views is None:
            return None
        view = self.buffer._views.made.tensors[self.index]
        return view if self.is_in(view) else None


def _inside(runs: Sequence[Run], offset: int) -> bool:
    index = bisect_right(runs, offset, key=lambda run: run[0]) - 1
    return index >= 0 and offset < runs[index][1]
