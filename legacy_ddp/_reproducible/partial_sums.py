"""Partial sums of this rank's leaves since the last call, in the order of a fixed tree. No communication.

The sums are a binary counter: after n leaves there is a sum for every 1 among the binary digits of n. The digit for 2^k
has the sum of 2^k leaves, the oldest leaves first. Each sum is a node of the tree, whatever leaves follow. The last
leaf lies in the buffers' flat tensors until a new leaf comes or the call adds all leaves.
"""

from collections.abc import Sequence

import torch

from legacy_ddp._buckets.flat_buffer import ABSENT, FlatBuffer
from legacy_ddp._buckets.layout import Bucket, wire_dtype
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._buckets.segment import Segment, SegmentPolicy

_CONVERTED_NUMEL = 2**18  # elements at a time: all at once, fresh memory takes five times as long


class PartialSums:
    """The sums, flat tensors of shape (bucket.numel,): fp16 leaves are added in fp32, other leaves in their dtype.

    Memory is kept from step to step. 2^k leaves need k + 1 tensors besides the last leaf. With the host transport the
    total lies in a segment, and the other ranks read it there.
    """

    def __init__(self, bucket: Bucket, policy: SegmentPolicy) -> None:
        self.dtype = wire_dtype(bucket.dtype, None)
        self._bucket = bucket
        self._policy = policy
        self._nodes: list[tuple[int, torch.Tensor]] = []  # number of leaves, and their sum
        self._total: tuple[torch.Tensor, Segment | None] | None = None  # its memory
        self._spare: list[torch.Tensor] = []
        self._recv: torch.Tensor | None = None  # if no sum is free for data of peers

    def add(self, leaf: torch.Tensor) -> None:
        """Add a leaf to the sums. The leaf is only read."""
        size, newest = 1, leaf
        while self._nodes and self._nodes[-1][0] == size:
            _, older = self._nodes.pop()
            _add_to(older, newest)
            if newest is not leaf:
                self._spare.append(newest)
            size, newest = 2 * size, older
        self._nodes.append((size, self._take().copy_(leaf) if newest is leaf else newest))

    def total(self, last: torch.Tensor | None) -> torch.Tensor:
        """The sum of all leaves and of ``last``, a further leaf, in the dtype of the tree. At least one leaf is needed.

        No sum changes. If there is only one part, nothing is added, and the result is this part itself: ``last``, or a
        sum. A sum is copied if the other ranks read the result from a segment, in which no sum lies.
        """
        parts = [tensor for _, tensor in self._nodes] + ([] if last is None else [last])
        newest = parts.pop()
        if not parts and newest.dtype == self.dtype and (newest is last or not self._policy.is_for(self._bucket)):
            return newest
        total = self._memory_of_total()
        if not parts or newest.dtype != self.dtype:  # an addition of two dtypes would convert in fresh memory
            newest = total.copy_(newest)
        while parts:  # from the end: an incomplete run is added to the run before it
            newest = torch.add(parts.pop(), newest, out=total)
        return newest

    def zeros(self) -> torch.Tensor:
        """Zeros in place of a total."""
        return self._memory_of_total().zero_()

    def segment_of(self, total: torch.Tensor) -> Segment | None:
        """The segment of a result of :meth:`total` or :meth:`zeros`; None for a leaf or for ordinary memory."""
        return self._total[1] if self._total is not None and total is self._total[0] else None

    def reserve(self, total: torch.Tensor) -> None:
        """Allocate a :meth:`recv_buffer` if needed. Where the host transport carries, the other ranks send nothing."""
        if self._policy.carries(self._bucket) or self._idle(total) is not None:
            self._recv = None
        elif self._recv is None:
            self._recv = self._new()

    def recv_buffer(self, total: torch.Tensor) -> torch.Tensor:
        """Memory for data of peers: of a sum no longer needed. ``total``: as for :meth:`reserve`, called before."""
        idle = self._idle(total)
        if idle is None:
            idle = self._recv
        return self._new() if idle is None else idle

    def clear(self) -> None:
        """Drop all leaves; the memory stays."""
        nodes, self._nodes = self._nodes, []
        self._spare += [tensor for _, tensor in nodes]  # after the sums are gone: no memory is in both

    def _memory_of_total(self) -> torch.Tensor:
        """Kept apart from the other sums: the other ranks have mapped this segment."""
        if self._total is None or not self._policy.fits(self._bucket, self._total[1]):
            self._total = self._policy.allocate(self._bucket, self.dtype)
        return self._total[0]

    def _idle(self, total: torch.Tensor) -> torch.Tensor | None:
        held = [*self._spare, *(tensor for _, tensor in self._nodes)]
        return next((tensor for tensor in held if tensor is not total), None)

    def _take(self) -> torch.Tensor:
        return self._spare.pop() if self._spare else self._new()

    def _new(self) -> torch.Tensor:
        return torch.empty(self._bucket.numel, dtype=self.dtype, device=self._bucket.device)


def _add_to(total: torch.Tensor, leaf: torch.Tensor) -> None:
    """Add ``leaf``, which may have a narrower dtype, in pieces: torch would convert the whole leaf in fresh memory."""
    if leaf.dtype == total.dtype:
        total.add_(leaf)
        return
    wide = total.new_empty(min(_CONVERTED_NUMEL, total.numel()))
    for sums, narrow in zip(torch.split(total, _CONVERTED_NUMEL), torch.split(leaf, _CONVERTED_NUMEL), strict=True):
        sums.add_(wide[: narrow.numel()].copy_(narrow))


class LeafSums:
    """The leaves since the last call: ``count``, and the largest kind of gradient per slot."""

    def __init__(self, policy: SegmentPolicy) -> None:
        self.count = 0
        self._policy = policy
        self.is_waiting = False  # the last leaf lies in the flat tensors, and in no sum yet
        self._kinds: list[int] = []
        self._for: tuple[Sequence[FlatBuffer], list[PartialSums]] = (), []  # buffers, with the sums of each

    def fits(self, plan: Plan) -> bool:
        """Whether the sums belong to the plan's buffers. Makes new sums for the plan if there are no leaves."""
        if self._buffers is not plan.buffers and not self.count:
            self._for = plan.buffers, [PartialSums(buffer.bucket, self._policy) for buffer in plan.buffers]
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
        self._for = (), []

    @property
    def _buffers(self) -> Sequence[FlatBuffer]:
        return self._for[0]

    @property
    def _sums(self) -> list[PartialSums]:
        return self._for[1]

    def _set_waiting(self, *, is_waiting: bool) -> None:
        self.is_waiting = is_waiting
        for buffer in self._buffers:
            buffer.moves_enabled = not is_waiting

    def _joined(self, kinds: Sequence[int]) -> list[int]:
        return [max(pair) for pair in zip(kinds, self._kinds, strict=True)] if self._kinds else list(kinds)
