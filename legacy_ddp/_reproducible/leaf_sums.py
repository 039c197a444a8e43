"""Sums of this rank's leaves since the last call, per buffer. No communication.

The last leaf lies in the buffers' flat tensors until a new leaf comes or the call adds all leaves.
"""

from collections.abc import Sequence

import torch

from legacy_ddp._buckets.flat_buffer import ABSENT, FlatBuffer
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._buckets.segment import Segment, SegmentPolicy
from legacy_ddp._reproducible.partial_sums import PartialSums


class LeafSums:
    """The leaves since the last call: ``count``, and the largest kind of gradient per slot."""

    def __init__(self, policy: SegmentPolicy) -> None:
        self.count = 0
        self._policy = policy
        self.is_waiting = False  # the last leaf lies in the flat tensors, and in no sum yet
        self._kinds: list[int] = []
        self._buffers: Sequence[FlatBuffer] = ()
        self._sums: list[PartialSums] = []  # one per buffer

    def fits(self, plan: Plan) -> bool:
        """Whether the sums belong to the plan's buffers. Makes new sums for the plan if there are no leaves."""
        if self._buffers is not plan.buffers and not self.count:
            self._buffers = plan.buffers
            self._sums = [PartialSums(buffer.bucket, self._policy) for buffer in plan.buffers]
        return self._buffers is plan.buffers

    def hold(self, kinds: Sequence[int]) -> None:
        """Count the packed gradients in the flat tensors, of these kinds, as a further leaf. No sum is changed."""
        self._set_waiting(is_waiting=True)
        self._kinds = self._joined(kinds)
        self.count += 1

    def add_waiting(self) -> None:
        """Add the waiting leaf to the sums, before another leaf or the user writes to the flat tensors."""
        if not self.is_waiting:
            return
        self._set_waiting(is_waiting=False)
        for sums, buffer in zip(self._sums, self._buffers, strict=True):
            sums.add(buffer.flat)

    def total(self, plan: Plan, kinds: Sequence[int], *, has_peers: bool) -> tuple[int, list[int], list[torch.Tensor]]:
        """The number of leaves, the kinds of gradient in their sum, and the sum, a flat tensor per buffer.

        ``kinds``: of the gradients after the last block. Changes nothing that a user can see.
        """
        is_one_more = not self.count or any(kind != ABSENT for kind in kinds)
        lies_flat = self.is_waiting or is_one_more
        flats = [
            sums.total(buffer.flat if lies_flat else None)
            for sums, buffer in zip(self._sums, plan.buffers, strict=True)
        ]
        if has_peers:
            self.reserve(flats)
        return self.count + is_one_more, self._joined(kinds), flats

    def zeros(self, *, has_peers: bool) -> list[torch.Tensor]:
        """Zeros in place of the sum, for a rank that takes no part. The leaves stay until the call succeeds."""
        flats = [sums.zeros() for sums in self._sums]
        if has_peers:
            self.reserve(flats)
        return flats

    def segments(self, flats: Sequence[torch.Tensor]) -> list[Segment | None]:
        """The segments of ``flats``, the result of :meth:`total` or :meth:`zeros`; None for a buffer's flat tensor."""
        return [sums.segment_of(flat) for sums, flat in zip(self._sums, flats, strict=True)]

    def reserve(self, flats: Sequence[torch.Tensor]) -> None:
        """Allocate the receive buffers for ``flats``, the result of :meth:`total` or :meth:`zeros`, if needed."""
        for sums, flat in zip(self._sums, flats, strict=True):
            sums.reserve(flat)

    def recv_buffer(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Receive buffer as large as ``flat``, the result of :meth:`total` for the buffer with this number.

        Overwrites leaves: the step ends here.
        """
        return self._sums[index].recv_buffer(flat)

    def clear(self) -> None:
        """Drop all leaves; the memory stays."""
        for sums in self._sums:
            sums.clear()
        self._set_waiting(is_waiting=False)
        self.count, self._kinds = 0, []

    def release_memory(self) -> None:
        """Drop the memory, after :meth:`clear`."""
        self._sums, self._buffers = [], ()

    def _set_waiting(self, *, is_waiting: bool) -> None:
        self.is_waiting = is_waiting
        for buffer in self._buffers:
            buffer.moves_enabled = not is_waiting

    def _joined(self, kinds: Sequence[int]) -> list[int]:
        return [max(pair) for pair in zip(kinds, self._kinds, strict=True)] if self._kinds else list(kinds)
