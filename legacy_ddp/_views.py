"""The slots of one flat tensor as tensors: is a gradient one of them, and does anybody else hold one? Tensors only.

They are made once and lent to ``.grad`` again and again. Identity of the object proves nothing: ``.to()``, ``.data =``
and ``set_()`` put other memory under it, so what it was like when it was made is compared, too.
"""

from collections.abc import Sequence
from typing import Any

import torch

from legacy_ddp import _torch_internals as internals
from legacy_ddp._layout import Slot


class SlotViews(Sequence[torch.Tensor]):
    """One tensor per slot, of the parameter's shape, in the memory of ``flat``; an empty one has memory of its own."""

    def __init__(self, flat: torch.Tensor, slots: Sequence[Slot]) -> None:
        self._flat = flat
        self._slots = slots
        self._views = [self._make(slot) for slot in slots]
        self._addresses = list(map(torch.Tensor.data_ptr, self._views))
        self._likeness = internals.Likeness(self._views)
        self._holders = internals.storage_use_count(flat)

    def __getitem__(self, index: Any) -> Any:
        return self._views[index]

    def __len__(self) -> int:
        return len(self._views)

    def recognise(self, grads: Sequence[torch.Tensor | None]) -> list[bool]:
        """Which of the gradients, one per slot, are their slots."""
        is_like = self._likeness.holds(self._views)
        if not is_like or list(map(torch.Tensor.data_ptr, self._views)) != self._addresses:
            self._mend()
        return [grad is view for grad, view in zip(grads, self._views, strict=True)]

    def resembles(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether each gradient is like its slot: dense, of the same shape, strides and dtype, and plain."""
        present = [grad for grad in grads if grad is not None]
        return len(present) == len(self) and self._likeness.holds(present)

    def shared(self, held: Sequence[bool]) -> bool:
        """Whether somebody holds memory of the slots, besides those gradients that are their slots (``held``)."""
        idle = [view for view, is_held in zip(self._views, held, strict=True) if not is_held]
        return internals.storage_use_count(self._flat) != self._holders or internals.held_elsewhere(idle)

    def is_free(self, index: int) -> bool:
        """Whether nobody at all would see what is written to the slot."""
        return (
            not internals.held_elsewhere(self._views[index : index + 1])
            and internals.storage_use_count(self._flat) == self._holders
            and self._is_intact(index)
        )

    def _make(self, slot: Slot) -> torch.Tensor:
        if slot.numel == 0:
            return self._flat.new_empty_strided(slot.shape, slot.stride)
        return self._flat.as_strided(slot.shape, slot.stride, slot.offset)

    def _mend(self) -> None:
        """Make anew what is no view of its slot any more: it belongs to whoever changed it."""
        for index, slot in enumerate(self._slots):
            if not self._is_intact(index):
                self._views[index] = self._make(slot)
        self._likeness = internals.Likeness(self._views)

    def _is_intact(self, index: int) -> bool:
        view, slot = self._views[index], self._slots[index]
        return (
            view.data_ptr() == self._addresses[index]
            and view.shape == slot.shape
            and view.stride() == slot.stride
            and view.dtype == self._flat.dtype
            and not (view.requires_grad or view.is_conj() or view.is_neg())
        )
