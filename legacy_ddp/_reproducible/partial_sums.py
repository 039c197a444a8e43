"""Partial sums of the leaves of one bucket, in the order of a fixed tree. No communication.

The sums are a binary counter: after n leaves there is a sum for every 1 among the binary digits of n. The digit for 2^k
has the sum of 2^k leaves, the oldest leaves first. Each sum is a node of the tree, whatever leaves follow.
"""

import torch

from legacy_ddp._buckets.layout import Bucket
from legacy_ddp._buckets.wire import wire_dtype


class PartialSums:
    """The sums, flat tensors of shape (bucket.numel,): fp16 leaves are added in fp32, other leaves in their dtype.

    Memory is kept from step to step. 2^k leaves need k + 1 tensors besides the last leaf.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.dtype = wire_dtype(bucket.dtype, None)
        self._bucket = bucket
        self._nodes: list[tuple[int, torch.Tensor]] = []  # number of leaves, and their sum
        self._total: torch.Tensor | None = None
        self._spare: list[torch.Tensor] = []

    def add(self, leaf: torch.Tensor) -> None:
        """Add a leaf to the sums. The leaf is only read."""
        size, newest = 1, leaf
        while self._nodes and self._nodes[-1][0] == size:
            _, older = self._nodes.pop()
            older.add_(newest)
            if newest is not leaf:
                self._spare.append(newest)
            size, newest = 2 * size, older
        self._nodes.append((size, self._take().copy_(leaf) if newest is leaf else newest))

    def total(self, last: torch.Tensor | None) -> torch.Tensor:
        """The sum of all leaves and of ``last``, a further leaf, in the dtype of the tree. At least one leaf is needed.

        Changes no sum. The result is ``last`` or a sum itself if there is nothing to add.
        """
        parts = [tensor for _, tensor in self._nodes] + ([] if last is None else [last])
        if len(parts) == 1 and parts[0].dtype == self.dtype:
            return parts[0]
        if self._total is None:
            self._total = self._take()
        newest = parts.pop()
        if not parts:
            return self._total.copy_(newest)
        while parts:  # from the end: an incomplete run is added to the run before it
            newest = torch.add(parts.pop(), newest, out=self._total)
        return newest

    def zeros(self) -> torch.Tensor:
        """Zeros in place of a total."""
        if self._total is None:
            self._total = self._take()
        return self._total.zero_()

    def reserve(self, total: torch.Tensor) -> None:
        """Allocate a :meth:`recv_buffer` if needed."""
        if self._idle(total) is None:
            self._spare.append(self._new())

    def recv_buffer(self, total: torch.Tensor) -> torch.Tensor:
        """Memory for data of peers: of a sum no longer needed. ``total``: the result of :meth:`total`."""
        idle = self._idle(total)
        return self._new() if idle is None else idle

    def clear(self) -> None:
        """Drop all leaves; the memory stays."""
        self._spare += [tensor for _, tensor in self._nodes]
        if self._total is not None:
            self._spare.append(self._total)
        self._nodes, self._total = [], None

    def _idle(self, total: torch.Tensor) -> torch.Tensor | None:
        held = [*self._spare, *(tensor for _, tensor in self._nodes)]
        return next((tensor for tensor in held if tensor is not total), None)

    def _take(self) -> torch.Tensor:
        return self._spare.pop() if self._spare else self._new()

    def _new(self) -> torch.Tensor:
        return torch.empty(self._bucket.numel, dtype=self.dtype, device=self._bucket.device)
