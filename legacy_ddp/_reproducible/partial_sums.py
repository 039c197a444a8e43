"""Partial sums of the leaves of one bucket, in the order of a fixed tree. No communication.

The sums are a binary counter: after n leaves there is a sum for every 1 among the binary digits of n. The digit for 2^k
has the sum of 2^k leaves, the oldest leaves first. Each sum is a node of the tree, whatever leaves follow.
"""

import torch

from legacy_ddp._buckets.layout import Bucket, wire_dtype
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
        self._total: torch.Tensor | None = None
        self._segment: Segment | None = None  # of _total
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

        Changes no sum. If there is nothing to add, the result is ``last``, or a sum itself unless the other ranks read
        the result from a segment.
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
        return self._segment if total is self._total else None

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
        self._spare += [tensor for _, tensor in self._nodes]
        self._nodes = []

    def _memory_of_total(self) -> torch.Tensor:
        """Kept apart from the other sums: the other ranks have mapped this segment."""
        if self._total is None or not self._policy.fits(self._bucket, self._segment):
            self._total, self._segment = self._policy.allocate(self._bucket, self.dtype)
        return self._total

    def _idle(self, total: torch.Tensor) -> torch.Tensor | None:
        held = [*self._spare, *(tensor for _, tensor in self._nodes)]
        return next((tensor for tensor in held if tensor is not total), None)

    def _take(self) -> torch.Tensor:
        return self._spare.pop() if self._spare else self._new()

    def _new(self) -> torch.Tensor:
        return torch.empty(self._bucket.numel, dtype=self.dtype, device=self._bucket.device)


def _add_to(total: torch.Tensor, leaf: torch.Tensor) -> None:
    """Add ``leaf``, which may have a narrower dtype: torch would convert the whole leaf, in fresh memory."""
    if leaf.dtype == total.dtype:
        total.add_(leaf)
        return
    numel = _CONVERTED_NUMEL
    wide = total.new_empty(min(numel, total.numel()))
    for sums, narrow in zip(torch.split(total, numel), torch.split(leaf, numel), strict=True):
        sums.add_(wide[: narrow.numel()].copy_(narrow))
