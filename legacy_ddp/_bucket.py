"""Gradients of one bucket <-> one flat tensor: pack them in, alias them to it. No communication.

A gradient that already *is* its slot of the flat tensor is not copied at all. What makes that safe is one count: if
anybody but such gradients shares the flat tensor's memory (a gradient the user kept, two gradients swapped by hand, a
transposed one), this call takes a fresh tensor and leaves the old one to its other holders.
"""

from bisect import bisect_right
from collections.abc import Sequence

import torch

from legacy_ddp import _torch_internals as internals
from legacy_ddp._errors import GradientError
from legacy_ddp._layout import Bucket, Run, Slot
from legacy_ddp._settings import Settings

ABSENT, DENSE, SPARSE = 0, 1, 2  # kinds of gradient; SPARSE + sparse_dim for a sparse one


class FlatBuffer:
    """The flat tensor of one bucket, shape (bucket.numel,), and the gradients that live in it."""

    def __init__(self, bucket: Bucket, settings: Settings) -> None:
        self.bucket = bucket
        self.flat = torch.empty(0, dtype=bucket.dtype, device=bucket.device)
        self._carried = self.flat
        self.wire: torch.Tensor | None = None
        self._as_views = settings.gradient_as_bucket_view
        self._wire_dtype = wire_dtype(bucket.dtype, settings.reduce_dtype)
        self._held = [False] * len(bucket.slots)  # whose gradient is its slot already
        self._left_version = -1  # of the flat tensor, when the last call left its result in it

    def recognise(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Note which gradients (one per slot) are their slots already."""
        address, itemsize = self.flat.data_ptr(), self.flat.itemsize
        self._held = [
            grad is not None and _is_slot(grad, slot, address + slot.offset * itemsize, self.bucket.dtype)
            for slot, grad in zip(self.bucket.slots, grads, strict=True)
        ]

    def check(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Refuse what cannot be reduced, before anything is written; for gradients that :meth:`recognise` has seen.

        Raises:
            GradientError: a gradient requires grad, has another shape or dtype than planned, or an unsupported layout.
        """
        for slot, grad, held in zip(self.bucket.slots, grads, self._held, strict=True):
            if grad is not None and not held:
                _check_gradient(self.bucket, slot, grad)

    def pack(self, grads: Sequence[torch.Tensor | None], *, copy: bool = True) -> None:
        """Copy the dense gradients to their slots, but those that are there; None and sparse ones are passed over.

        Writes nothing that a ``.grad`` can see. With ``copy=False`` only the room is made.
        """
        if self._needs_fresh_flat():
            self.flat = torch.empty(self.bucket.numel, dtype=self.bucket.dtype, device=self.bucket.device)
            self._carried = torch.from_dlpack(self.flat)  # type: ignore[attr-defined]  # not in its stubs
            self._held = [False] * len(self._held)
        loose = [
            (slot, grad)
            for slot, grad, held in zip(self.bucket.slots, grads, self._held, strict=True)
            if not held and grad is not None and kind_of(grad) == DENSE
        ]
        if copy and loose:
            torch._foreach_copy_([self.view(slot) for slot, _ in loose], [grad for _, grad in loose])

    def make_wire(self) -> None:
        """Make room for the copy in the wire's dtype, where it is another one."""
        if self._wire_dtype != self.bucket.dtype and self.wire is None:
            self.wire = torch.empty(self.bucket.numel, dtype=self._wire_dtype, device=self.bucket.device)

    def forget(self) -> None:
        """Start from no memory at all."""
        self.flat = self._carried = self.flat.new_empty(0)
        self.wire = None

    def view(self, slot: Slot) -> torch.Tensor:
        """The slot as a tensor of the parameter's shape; an empty one has memory of its own."""
        if slot.numel == 0:
            return self.flat.new_empty_strided(slot.shape, slot.stride)
        return self.flat.as_strided(slot.shape, slot.stride, slot.offset)

    def untouched(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether every packed gradient was the view that the last call left, whatever was written into it since."""
        return all(
            held or grad is None or slot.numel == 0
            for slot, grad, held in zip(self.bucket.slots, grads, self._held, strict=True)
        )

    @property
    def written(self) -> bool:
        """Whether the flat tensor, or any view of it, was written to since the last call left its result."""
        return self.flat._version != self._left_version

    def zero(self, kinds: Sequence[int], *, runs: Sequence[Run]) -> None:
        """Clear the slots inside ``runs`` (not cut, in order) that hold no dense gradient of this rank."""
        for slot, kind in zip(self.bucket.slots, kinds, strict=True):
            if kind != DENSE and _inside(runs, slot.offset):
                self.flat[slot.offset : slot.offset + slot.numel].zero_()

    def alias(self, parameters: Sequence[torch.Tensor], kinds: Sequence[int]) -> None:
        """Give every parameter its reduced gradient, a view of the flat tensor or a copy; absent ones become None."""
        written: set[int] = set()
        for slot, parameter, kind, held in zip(self.bucket.slots, parameters, kinds, self._held, strict=True):
            if kind == ABSENT:
                parameter.grad = None
            elif kind == DENSE and not self._as_views:
                parameter.grad = _copy_out(self.view(slot), parameter.grad, written)
            elif kind == DENSE and not held:
                parameter.grad = self.view(slot)
        self._left_version = self.flat._version

    @property
    def travelling(self) -> torch.Tensor:
        """What collectives carry: the flat tensor's memory, or its copy in another dtype.

        The memory under a second storage: a transport's thread may hold what it carried for milliseconds after the
        wait, which must not look like a gradient that somebody kept.
        """
        return self._carried if self.wire is None else self.wire

    def _needs_fresh_flat(self) -> bool:
        if self.flat.numel() != self.bucket.numel:
            return True
        return internals.storage_use_count(self.flat) != 1 + sum(self._held)


def _is_slot(grad: torch.Tensor, slot: Slot, address: int, dtype: torch.dtype) -> bool:
    """Whether ``grad`` is exactly the slot that begins at ``address``. Identity of the object proves nothing."""
    return (
        grad.layout is torch.strided
        and slot.numel > 0
        and grad.data_ptr() == address
        and grad.stride() == slot.stride
        and grad.shape == slot.shape
        and grad.dtype == dtype
        and not (grad.requires_grad or grad.is_conj() or grad.is_neg())
    )


def _inside(runs: Sequence[Run], offset: int) -> bool:
    index = bisect_right(runs, offset, key=lambda run: run[0]) - 1
    return index >= 0 and offset < runs[index][1]


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


def kind_of(grad: torch.Tensor | None) -> int:
    """ABSENT, DENSE, or SPARSE + sparse_dim."""
    if grad is None:
        return ABSENT
    return DENSE if grad.layout is torch.strided else SPARSE + grad.sparse_dim()


def _check_gradient(bucket: Bucket, slot: Slot, grad: torch.Tensor) -> None:
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
