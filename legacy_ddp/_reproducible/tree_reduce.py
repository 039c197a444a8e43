"""PartialSums of all ranks, added in the order of a fixed tree over all their micro-batches. Collective (payload).

Each rank owns a share of every run: it receives that share of all others, adds them in the tree's order, divides, and
gives the result to all. A rank sends what it would send in a ring all-reduce, 2 (W - 1) / W of the bytes; and no sum
depends on where its element lies, on the transport, or on who owns it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from legacy_ddp._buckets.flat_buffer import as_real
from legacy_ddp._buckets.layout import Run
from legacy_ddp._transport.call import Call


@dataclass(frozen=True)
class TreeInput:
    """What ranks have in common of one buffer's tree; three flat tensors of one size.

    ``own``: the sum of this rank's leaves, a node of the tree; it is overwritten. ``recv_buffer``: room for the others'.
    ``result``: where the reduced gradients go; it may be ``own``. ``runs``: the elements that travel.
    """

    own: torch.Tensor
    recv_buffer: torch.Tensor
    result: torch.Tensor
    runs: Sequence[Run]


def tree_reduce(call: Call, inputs: Sequence[TreeInput], divisor: int) -> int:
    """Put the sums over all ranks, divided by ``divisor``, into every result; return the bytes handed over.

    The collectives of all runs are started before the first is waited for.
    """
    shares = [ShardedRun(call, tree_input, run) for tree_input in inputs for run in tree_input.runs]
    arriving = [share.exchange() for share in shares]
    given = []
    for share, works in zip(shares, arriving, strict=True):
        share.wait(works)
        share.finish_own(divisor)
        given.append(share.broadcast_result())
    for share, works in zip(shares, given, strict=True):
        share.wait(works)
    return sum(share.size_bytes for share in shares) if call.groups.size > 1 else 0


class ShardedRun:
    """One run, cut into a share per rank."""

    def __init__(self, call: Call, tree_input: TreeInput, run: Run) -> None:
        self._call = call
        self._group = call.groups.payload(tree_input.own.device)
        self._size, self._rank = call.groups.size, call.groups.rank
        own, recv_buffer, self._result = (
            as_real(flat[slice(*run)]) for flat in (tree_input.own, tree_input.recv_buffer, tree_input.result)
        )
        bounds = [own.numel() * index // self._size for index in range(self._size + 1)]
        self._lengths = [stop - start for start, stop in pairwise(bounds)]
        self._below, self._mine, self._above = own.tensor_split([bounds[self._rank], bounds[self._rank + 1]])
        needed = (self._size - 1) * self._mine.numel()
        if needed > recv_buffer.numel():  # where there are few more elements than ranks
            recv_buffer = own.new_empty(needed)
        self._recv_buffer = recv_buffer[:needed]
        self._results = torch.split(self._result, self._lengths)
        self.size_bytes = own.nbytes

    def exchange(self) -> list[Any]:
        """Start to bring every share of this rank's sum to its owner, and the others' sums of its own share here."""
        if self._size == 1:
            return []
        # Two exchanges, with the owners below and those above: a single one would copy what stays here, too.
        ranks, length, rank = range(self._size), self._mine.numel(), self._rank
        from_below, from_above = self._recv_buffer.tensor_split([rank * length])
        to_below = [self._lengths[other] if other < rank else 0 for other in ranks]
        to_above = [self._lengths[other] if other > rank else 0 for other in ranks]
        of_above = [length if other > rank else 0 for other in ranks]
        of_below = [length if other < rank else 0 for other in ranks]
        return [
            self._all_to_all(self._below, to_below, from_above, of_above),
            self._all_to_all(self._above, to_above, from_below, of_below),
        ]

    def finish_own(self, divisor: int) -> None:
        """Add this rank's share of all ranks' sums, level by level, and divide it."""
        nodes = list(torch.split(self._recv_buffer, self._mine.numel())) if self._recv_buffer.numel() else []
        nodes.insert(self._rank, self._mine)
        while len(nodes) > 1:
            paired = [left.add_(right) for left, right in zip(nodes[::2], nodes[1::2], strict=False)]
            nodes = paired + nodes[2 * len(paired) :]
        # A gradient that is missing from a leaf counts as zeros there, and -0.0 + 0.0 is 0.0.
        torch.div(nodes[0].add_(0.0), divisor, out=self._results[self._rank])

    def broadcast_result(self) -> list[Any]:
        """Start to give every rank's share of the result to all."""
        if self._size == 1:
            return []
        return [self._broadcast(share, rank) for rank, share in enumerate(self._results) if share.numel()]

    def wait(self, works: Sequence[Any]) -> None:
        for work in works:
            self._call.wait(self._group, work)

    def _all_to_all(self, sent: torch.Tensor, lengths: list[int], received: torch.Tensor, room: list[int]) -> Any:
        options = self._call.options("AllToAll")
        return self._call.start(self._group, lambda group: group.alltoall_base(received, sent, room, lengths, options))

    def _broadcast(self, share: torch.Tensor, source: int) -> Any:
        options = self._call.options("Broadcast")
        options.rootRank = source
        return self._call.start(self._group, lambda group: group.broadcast([share], options))
