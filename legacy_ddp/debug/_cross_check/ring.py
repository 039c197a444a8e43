"""The usual part of a cross-check: every rank runs its own batch, then the batch of the rank before. Collective."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from legacy_ddp._transport.call import Call
from legacy_ddp.debug._cross_check.exchange import failing_together, gather_sizes, pass_on
from legacy_ddp.debug._cross_check.passes import Passes
from legacy_ddp.debug._cross_check.verdict import Digests, differing_batches
from legacy_ddp.debug._operations.operation import Operation


@dataclass(frozen=True)
class Ring:
    """The digests of the runs of all ranks, as in :func:`~legacy_ddp.debug._cross_check.verdict.differing_batches`.

    ``sizes``: bytes of the batch of each rank, 0 without a batch. ``is_captured``: whether the runs were captured.
    ``operations``: then of the runs on this rank, by the rank of the batch.
    """

    sizes: Sequence[int]
    own: Sequence[Digests | None]
    foreign: Sequence[Digests | None]
    is_captured: bool
    operations: dict[int, list[Operation]] = field(default_factory=dict)

    @property
    def is_different_everywhere(self) -> bool:
        """Whether every one of several batches had other results in its second run."""
        batches = sum(map(bool, self.sizes))
        return 1 < batches == len(differing_batches(self.own, self.foreign))


def run_ring(call: Call, passes: Passes, data: torch.Tensor, *, with_operations: bool) -> Ring:
    """Run the batch in ``data`` and the batch of the rank before; gather the digests, 16 bytes per result and rank.

    Raises:
        PeerError: a run failed, on any rank. ValueError: no rank has a batch.
    """
    rank, size = call.groups.rank, call.groups.size
    with call.phase("batch"):
        sizes = gather_sizes(call, data)
        if not any(sizes):
            call.mark_finished()
            raise ValueError("no rank has a batch: got batch=None on all ranks, expected a batch on at least one rank")
        received = pass_on(call, data, sizes)
        with failing_together(call, "the batch of another rank"):
            passes.check_classes(received)
    held, operations = {rank: data, (rank - 1) % size: received}, dict[int, list[Operation]]()
    rows = []
    for batch, what in ((rank, "run"), ((rank - 1) % size, "run with the batch of the rank before")):
        with call.phase("run"), failing_together(call, what):
            digests: Digests = (0,) * len(passes.names)
            if sizes[batch]:
                digests, operations[batch] = passes.run(held[batch], with_operations=with_operations)
        rows.append(digests)
    with call.phase("compare"):
        table = call.gather(torch.tensor(rows, device="cpu")).tolist()
    own = [tuple(table[r][0]) if sizes[r] else None for r in range(size)]
    foreign = [tuple(table[r][1]) if sizes[(r - 1) % size] else None for r in range(size)]
    return Ring(sizes, own, foreign, with_operations, operations)
