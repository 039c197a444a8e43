"""One flat tensor, and its slots as tensors: is a gradient one of them, and does anybody else hold one? Tensors only.

The slots' views are made once and lent to ``.grad`` again and again. Each has a storage of its own over the flat
tensor's memory, so that counts tell of each slot by itself who holds it. Identity of the object proves nothing:
``.to()``, ``.data =`` and ``set_()`` put other memory under it, so what it was like when it was made is compared, too.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.layout import Bucket, Slot


class SlotViews(Sequence[torch.Tensor]):
    """One tensor per slot, of the parameter's shape, in the memory of ``flat``; an empty one has memory of its own.

    ``carried`` is that memory under one more storage: a transport's thread may hold what it carried for milliseconds
    after the wait, which must not look like somebody who keeps a gradient.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        self.transport_view = internals.under_own_storage(self.flat)
        self._slots = bucket.slots
        self._views = [self._make(slot) for slot in self._slots]
        self._storages = [view.untyped_storage() for view in self._views]
        self._replaced_storages: list[torch.UntypedStorage] = []  # of views that were replaced
        self._addresses = list(map(torch.Tensor.data_ptr, self._views))
        self._guards = internals.TensorGuards(self._views)
        # With a second list holding them, as there is whenever they are counted.
        self._expected_refs = internals.ref_counts(self._views[:], self._storages[:])
        (self._expected_storage_refs,) = _ref_counts_of_each([internals.under_own_storage(self.flat).untyped_storage()])
        self._result_versions: list[int] = []  # when the last call left its result here

    def __getitem__(self, index: Any) -> Any:
        return self._views[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def match_views(self, grads: Sequence[torch.Tensor | None]) -> list[bool]:
        """Which of the gradients, one per slot, are their slots."""
        is_like = self._guards.match(self._views)
        if not is_like or list(map(torch.Tensor.data_ptr, self._views)) != self._addresses:
            self._rebuild()
        return [grad is view for grad, view in zip(grads, self._views, strict=True)]

    def matches_slots(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether each gradient is like its slot: dense, of the same shape, strides and dtype, and plain."""
        present = [grad for grad in grads if grad is not None]
        return len(present) == len(self) and self._guards.match(present)

    def has_external_refs(self, held: Sequence[bool]) -> bool:
        """Whether somebody holds memory of a slot, besides those gradients that are their slots (``held``)."""
        if any(holders != self._expected_storage_refs for holders in _ref_counts_of_each(self._replaced_storages)):
            return True
        self._replaced_storages = []
        idle = [view for view, is_held in zip(self._views, held, strict=True) if not is_held]
        return not self._has_expected_refs(idle, self._storages[:])

    def is_reusable(self) -> bool:
        """Whether nobody holds memory of any slot. What is no view of its slot any more is made anew."""
        return not self.has_external_refs(self.match_views([None] * len(self)))

    def is_slot_unreferenced(self, index: int) -> bool:
        """Whether nobody at all would see what is written to the slot."""
        one = slice(index, index + 1)
        return self._has_expected_refs(self._views[one], self._storages[one]) and self._is_intact(index)

    def note_result(self) -> None:
        """A call has left its result here."""
        self._result_versions = [view._version for view in self._views]

    @property
    def was_written(self) -> bool:
        """Whether a view was written to since then."""
        return self._result_versions != [view._version for view in self._views]

    def _has_expected_refs(self, views: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage]) -> bool:
        now = internals.ref_counts(views, storages)
        return all(counts <= alone for counts, alone in zip(now, self._expected_refs, strict=True))

    def _make(self, slot: Slot) -> torch.Tensor:
        if slot.numel == 0:
            return self.flat.new_empty_strided(slot.shape, slot.stride)
        return internals.under_own_storage(self.flat.as_strided(slot.shape, slot.stride, slot.offset))

    def _rebuild(self) -> None:
        """Make anew what is no view of its slot any more: it belongs to whoever changed it.

        Its old storage may have holders, a detached gradient or a row of one: they still lie in the slot.
        """
        for index, slot in enumerate(self._slots):
            if not self._is_intact(index):
                self._replaced_storages.append(self._storages[index])
                self._views[index] = self._make(slot)
                self._storages[index] = self._views[index].untyped_storage()
        self._guards = internals.TensorGuards(self._views)

    def _is_intact(self, index: int) -> bool:
        view, slot = self._views[index], self._slots[index]
        return (
            type(view) is torch.Tensor
            and view.data_ptr() == self._addresses[index]
            and view.shape == slot.shape
            and view.stride() == slot.stride
            and view.dtype == self.flat.dtype
            and not (view.requires_grad or view.is_conj() or view.is_neg())
        )


def _ref_counts_of_each(storages: list[torch.UntypedStorage]) -> list[tuple[set[int], ...]]:
    return [internals.ref_counts([], [storage]) for storage in storages]
