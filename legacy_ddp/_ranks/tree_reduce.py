"""Reduction over a process group in the order of a tree over the micro-batches of all ranks. Collective (payload).

Each run is cut into a shard per rank of the group. A rank receives its shard from all other ranks, adds in the order of
the tree, divides, and broadcasts the result. A rank sends 2 (W - 1) / W of the bytes, as in a ring all-reduce. The
order of a sum does not depend on the place of the element, the transport, or the owner of the shard.

Micro-batches are the leaves of a binary tree. Rank r of W ranks with K micro-batches each holds leaves r K to
r K + K - 1. The sum of a rank is a node of the tree if K is a power of two, or if there is no other rank. If every host
has the same power of two of consecutive ranks, the sum over one host is a node of the tree over the ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from legacy_ddp._errors import argument_errors
from legacy_ddp._memory.layout import Run, as_real
from legacy_ddp._ranks.call import Call


def is_aligned(ranks: int, each: int) -> bool:
    """Whether ``ranks`` ranks with ``each`` micro-batches each add in the order of the tree."""
    return each >= 1 and (ranks == 1 or each.bit_count() == 1)


@argument_errors
def aligned_splits(total: int) -> list[tuple[int, int]]:
    """All (ranks, micro-batches each) of ``total`` micro-batches with the same order of sums; fewest ranks first.

    Raises:
        TypeError, ValueError: ``total`` is no int of at least 1.

    Example:
        >>> aligned_splits(4)
        [(1, 4), (2, 2), (4, 1)]
    """
    if not isinstance(total, int) or isinstance(total, bool):
        raise TypeError(f"total is of the wrong type: got {total!r}, expected a number of micro-batches, an int")
    if total < 1:
        raise ValueError(f"total is out of range: got {total}, expected at least 1 micro-batch")
    powers = (1 << power for power in range(total.bit_length()))
    return sorted({(1, total), *((total // each, each) for each in powers if total % each == 0)})


def format_splits(total: int) -> str:
    """The aligned splits of ``total``, for an error message."""
    splits = ", ".join(f"{ranks} x {each}" for ranks, each in aligned_splits(total))
    return f"splits of {total} that add in one order (ranks x each): {splits}"


def why_no_nodes(hosts: Sequence[Sequence[int]]) -> str:
    """Why the sum of a host is no node of the tree; empty if the sums of all hosts are nodes.

    ``hosts``: the ranks of every host, ascending; each host has equally many.
    """
    each = len(hosts[0])
    if each.bit_count() != 1:
        return f"{each} ranks on each host, which is no power of two"
    for ranks in hosts:
        for rank, following in pairwise(ranks):
            if following != rank + 1:
                return f"ranks {rank} and {following} of a host are not consecutive"
    return ""


@dataclass(frozen=True)
class TreeInput:
    """The input of the reduction for one buffer: three flat tensors of equal size."""

    group: Any  # of the ranks whose nodes are added, None for a single rank
    own: torch.Tensor  # the node of this rank; overwritten
    recv_buffer: torch.Tensor  # memory for the nodes of other ranks
    result: torch.Tensor  # receives the reduced gradients; may be ``own``
    runs: Sequence[Run]  # the elements to reduce


def tree_reduce(call: Call, inputs: Iterable[TreeInput], divisor: int) -> Iterator[int]:
    """Put the sums over all ranks, divided by ``divisor``, into every result.

    All collectives are started before the first wait: those of a run as soon as ``inputs`` yields its input.

    Yields:
        The number of bytes sent for each run, when its result is complete.
    """
    sharded = (_ShardedRun(call, tree_input, run) for tree_input in inputs for run in tree_input.runs)
    exchanges = [(run, run.exchange()) for run in sharded]
    broadcasts = []
    for run, works in exchanges:
        run.wait(works)
        run.reduce_own_shard(divisor)
        broadcasts.append((run, run.broadcast_result()))
    for run, works in broadcasts:
        run.wait(works)
        yield run.size_bytes


def add_in_tree_order(nodes: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of ``nodes``, level by level, in ``memory[0]``.

    ``memory``: a tensor like a node for every two nodes, overwritten. These may be every second node.
    """
    level = list(nodes)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], memory, strict=False)
        paired = [torch.add(left, right, out=total) for left, right, total in pairs]
        level = paired + level[2 * len(paired) :]
    return level[0].add_(0.0)  # turns -0.0 into 0.0, as a leaf without this gradient does, which counts as zeros


class _ShardedRun:
    """One run, cut into a shard per rank of the group."""

    def __init__(self, call: Call, tree_input: TreeInput, run: Run) -> None:
        self._call = call
        self._group = group = tree_input.group
        self._size: int = 1 if group is None else group.size()
        self._rank: int = 0 if group is None else group.rank()
        own, recv_buffer, result = (
            as_real(flat[slice(*run)]) for flat in (tree_input.own, tree_input.recv_buffer, tree_input.result)
        )
        bounds = [own.numel() * index // self._size for index in range(self._size + 1)]
        self._lengths = [stop - start for start, stop in pairwise(bounds)]
        self._below, self._own_shard, self._above = own.tensor_split([bounds[self._rank], bounds[self._rank + 1]])
        needed = (self._size - 1) * self._own_shard.numel()
        if needed > recv_buffer.numel():  # for example 5 elements on 4 ranks: a shard of 2 from each of 3 ranks
            recv_buffer = own.new_empty(needed)
        self._recv_buffer = recv_buffer[:needed]
        self._results = torch.split(result, self._lengths)
        self.size_bytes = own.nbytes if self._size > 1 else 0

    def exchange(self) -> list[Any]:
        """Start to send the shards of this rank's sum to their owners, and to receive its own shard of other sums."""
        if self._size == 1:
            return []
        # Two exchanges: one sends to lower ranks and receives from higher ranks, one the other way. A single exchange
        # would copy the own shard, too.
        ranks, length, rank = range(self._size), self._own_shard.numel(), self._rank
        from_below, from_above = self._recv_buffer.tensor_split([rank * length])
        to_below = [self._lengths[other] if other < rank else 0 for other in ranks]
        to_above = [self._lengths[other] if other > rank else 0 for other in ranks]
        of_above = [length if other > rank else 0 for other in ranks]
        of_below = [length if other < rank else 0 for other in ranks]
        return [
            self._all_to_all(self._below, to_below, from_above, of_above),
            self._all_to_all(self._above, to_above, from_below, of_below),
        ]

    def reduce_own_shard(self, divisor: int) -> None:
        nodes = list(torch.split(self._recv_buffer, self._own_shard.numel())) if self._recv_buffer.numel() else []
        nodes.insert(self._rank, self._own_shard)
        torch.div(add_in_tree_order(nodes, nodes[::2]), float(divisor), out=self._results[self._rank])

    def broadcast_result(self) -> list[Any]:
        if self._size == 1:
            return []
        return [self._broadcast(shard, rank) for rank, shard in enumerate(self._results) if shard.numel()]

    def wait(self, works: Sequence[Any]) -> None:
        for work in works:
            self._call.wait(self._group, work)

    def _all_to_all(
        self, sent: torch.Tensor, sent_lengths: list[int], received: torch.Tensor, received_lengths: list[int]
    ) -> Any:
        options = self._call.options("AllToAll")
        return self._call.start(
            self._group,
            lambda group: group.alltoall_base(received, sent, received_lengths, sent_lengths, options),
        )

    def _broadcast(self, shard: torch.Tensor, source: int) -> Any:
        options = self._call.options("Broadcast")
        options.rootRank = source
        return self._call.start(self._group, lambda group: group.broadcast([shard], options))
