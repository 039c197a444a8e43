"""Gradients of one bucket <-> one flat tensor: pack them in, alias them to it. No communication.

A gradient that already *is* its slot of the flat tensor is not copied at all. What makes that safe: if anybody but such
gradients holds the flat tensor's memory (a gradient the user kept, two gradients swapped by hand, a transposed one),
this call takes a fresh tensor and leaves the old one to its other holders.
"""

import threading
from bisect import bisect_right
from collections.abc import Sequence

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.gradient import ABSENT, DENSE, SPARSE, check_gradient, is_plain
from legacy_ddp._buckets.layout import Bucket, Run
from legacy_ddp._buckets.views import SlotViews
from legacy_ddp._settings import Settings


class FlatBuffer:
    """The flat tensor of one bucket, shape (bucket.numel,), and the gradients that live in it."""

    def __init__(self, bucket: Bucket, settings: Settings) -> None:
        self.bucket = bucket
        self.as_views = settings.gradient_as_bucket_view
        self.wire: torch.Tensor | None = None
        self._is_for_hook = settings.comm_hook is not None
        self._wire_dtype = bucket.dtype if self._is_for_hook else wire_dtype(bucket.dtype, settings.reduce_dtype)
        self._views: SlotViews | None = None  # made by the first backward or call
        self._spare: SlotViews | None = None  # the memory before, while somebody keeps a gradient of every call
        self._making = threading.Lock()  # backward passes may run in several threads
        self.moves_enabled = True  # in backward; not while the flat tensor holds what is still needed
        self._is_view = [False] * len(bucket.slots)  # whose gradient is its slot already
        self._result_identities: list[
            object
        ] = []  # identity of what the last call left in each slot, where not all are views

    @property
    def views(self) -> SlotViews:
        """The slots as tensors, and the flat tensor that they lie in; made if there is none."""
        with self._making:
            if self._views is None:
                with torch.inference_mode(False):  # a backward inside that mode may be the first
                    self._views = SlotViews(self.bucket)
            return self._views

    @property
    def flat(self) -> torch.Tensor:
        return self.views.flat

    @property
    def payload(self) -> torch.Tensor:
        """What collectives carry: the flat tensor's memory, or its copy in another dtype."""
        return self.views.transport_view if self.wire is None else self.wire

    def match_views(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Note which gradients (one per slot) are their slots already."""
        self._is_view = self._views.match_views(grads) if self._views is not None else [False] * len(self._is_view)

    def check(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Refuse what cannot be reduced, before anything is written; for gradients that :meth:`match_views` has seen.

        Raises:
            GradientError: as :func:`check_gradient`.
        """
        if self._views is not None and self._views.matches_slots(grads):
            return
        for slot, grad, held in zip(self.bucket.slots, grads, self._is_view, strict=True):
            if grad is not None and not held:
                check_gradient(self.bucket, slot, grad)

    def pack(self, grads: Sequence[torch.Tensor | None], *, copy: bool = True) -> None:
        """Copy the dense gradients to their slots, but those that are there; None and sparse ones are passed over.

        Writes nothing that a ``.grad`` can see. With ``copy=False`` only the room is made.
        """
        if self.views.has_external_refs(self._is_view):
            self._change_memory()
        else:
            self._spare = None
        if copy and not all(self._is_view):
            self._copy_in(grads)

    def move_to_slot(self, index: int, parameter: torch.Tensor) -> None:
        """Move the gradient that backward has just made to its slot, if nobody can tell; else it waits for the call."""
        if not self.moves_enabled or not internals.is_grad_unshared(parameter):
            return
        grad = parameter.grad
        if grad is None or not is_plain(self.bucket, self.bucket.slots[index], grad):
            return
        try:
            views = self.views
        except (RuntimeError, MemoryError):  # no room: the call will say so, on all ranks
            return
        if views.is_slot_unreferenced(index):
            parameter.grad = views[index].copy_(grad)

    def make_wire(self, *, has_peers: bool) -> None:
        """Make room for the copy that travels, where it is one: in another dtype, or for a hook to write to."""
        is_copy = self._is_for_hook or (has_peers and self._wire_dtype != self.bucket.dtype)
        size = self.bucket.numel * self._wire_dtype.itemsize
        if is_copy and (self.wire is None or self.wire.untyped_storage().nbytes() < size):  # a hook may have freed it
            self.wire = torch.empty(self.bucket.numel, dtype=self._wire_dtype, device=self.bucket.device)

    def release_memory(self) -> None:
        """Start from no memory at all."""
        self._views = self._spare = self.wire = None
        self._is_view = [False] * len(self._is_view)

    def holds_only_views(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether every packed gradient was the view that the last call left, whatever was written into it since."""
        return all(
            held or grad is None or slot.numel == 0
            for slot, grad, held in zip(self.bucket.slots, grads, self._is_view, strict=True)
        )

    @property
    def has_external_refs(self) -> bool:
        """Whether somebody holds memory of a slot, where no ``.grad`` lies in one."""
        return self.views.has_external_refs([False] * len(self.bucket.slots))

    def is_last_result(self, index: int, grad: torch.Tensor) -> bool:
        """Whether ``grad`` is the object that the last call left for the slot, whatever was written into it since."""
        if self._result_identities:
            return internals.identity(grad) is self._result_identities[index]
        return self._views is not None and grad is self._views[index]

    @property
    def was_written(self) -> bool:
        """Whether a gradient was written to since the last call left its result."""
        return self.views.was_written

    def zero(self, kinds: Sequence[int], *, runs: Sequence[Run], flat: torch.Tensor | None = None) -> None:
        """Clear the slots inside ``runs`` (not cut, in order) that hold no dense gradient of this rank, in the flat
        tensor or in ``flat``, one like it."""
        flat = self.flat if flat is None else flat
        for slot, kind in zip(self.bucket.slots, kinds, strict=True):
            if kind != DENSE and _inside(runs, slot.offset):
                flat[slot.offset : slot.offset + slot.numel].zero_()

    def alias(self, parameters: Sequence[torch.Tensor], kinds: Sequence[int]) -> None:
        """Give every parameter its reduced gradient, a view of the flat tensor or a copy; absent ones become None."""
        written: set[int] = set()
        for view, parameter, kind, held in zip(self.views, parameters, kinds, self._is_view, strict=True):
            if kind == ABSENT:
                parameter.grad = None
            elif kind == DENSE and not self.as_views:
                parameter.grad = _copy_out(view, parameter.grad, written)
            elif kind == DENSE and not held:
                parameter.grad = view
        self.views.note_result()
        self._result_identities = []
        if not self.as_views or max(kinds, default=ABSENT) >= SPARSE:
            grads = (parameter.grad for parameter in parameters)
            self._result_identities = [None if grad is None else internals.identity(grad) for grad in grads]

    def _change_memory(self) -> None:
        """Leave the memory to its holders. In a loop that keeps a gradient of every call, such as a loop variable, the
        holders of the memory before have gone: writing to it again costs half of what fresh memory does."""
        free = self._spare
        if free is None or not free.is_reusable():
            free = SlotViews(self.bucket)
        self._views, self._spare, self._is_view = free, self._views, [False] * len(self._is_view)

    def _copy_in(self, grads: Sequence[torch.Tensor | None]) -> None:
        slots: list[torch.Tensor] = []
        loose: list[torch.Tensor] = []
        for view, grad, held in zip(self.views, grads, self._is_view, strict=True):
            if not held and grad is not None and grad.layout is torch.strided:
                slots.append(view)
                loose.append(grad)
        if loose:
            torch._foreach_copy_(slots, loose)


def _inside(runs: Sequence[Run], offset: int) -> bool:
    index = bisect_right(runs, offset, key=lambda run: run[0]) - 1
    return index >= 0 and offset < runs[index][1]


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """The same memory, complex numbers as two real ones each."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def wire_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """In what a bucket of ``dtype`` travels: complex ones as they are, the others in ``reduce_dtype`` if there is one.

    fp16 travels as fp32 unless the user asks for less: no divisor applied before the sum serves both ends of its range
    (at two ranks 40000 + 40000 overflows undivided, and 6e-8 divided by 2 is 0).
    """
    if dtype.is_complex:
        return dtype
    if reduce_dtype is not None:
        return reduce_dtype
    return torch.float32 if dtype == torch.float16 else dtype


def _copy_out(view: torch.Tensor, grad: torch.Tensor | None, written: set[int]) -> torch.Tensor:
    """The reduced values in ``grad`` if nothing else lives in its memory, else in a new tensor."""
    can_take = (
        grad is not None
        and grad.layout is torch.strided
        and (grad.shape, grad.stride(), grad.dtype) == (view.shape, view.stride(), view.dtype)
        and not (grad.is_inference() or grad.is_conj() or grad.is_neg())
        and grad.data_ptr() not in written  # one tensor may be the gradient of two parameters
        and internals.storage_use_count(grad) == 1
    )
    if grad is None or not can_take:
        return view.clone()
    written.add(grad.data_ptr())
    return grad.copy_(view)
