"""What reproducible=True should leave, said once more in one process: a recursive tree over a step's micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers.cases import Grads, get_gradients, module_of


def tree_sum(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first part is the largest power of two that is less than all; each part is added up likewise."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1
    while 2 * half < len(leaves):
        half *= 2
    return tree_sum(leaves[:half]) + tree_sum(leaves[half:])


def reduced(leaves: Sequence[torch.Tensor | None], divisor: int) -> torch.Tensor | None:
    """The gradient that these micro-batches should leave; fp16 is added in fp32."""
    present = [leaf for leaf in leaves if leaf is not None]
    if not present or not divisor:
        return None
    dtype = present[0].dtype
    wide = torch.float32 if dtype == torch.float16 else dtype
    full = [torch.zeros(present[0].shape, dtype=wide) if leaf is None else leaf.to(wide) for leaf in leaves]
    total = tree_sum(full) + 0.0
    if dtype.is_complex:
        return torch.view_as_complex(torch.view_as_real(total) / divisor)
    return (total / divisor).to(dtype)


@dataclass(frozen=True)
class Window:
    """One step: the gradients of every micro-batch, and how many of a rank's stand in no_sync() blocks of their own.

    ``leaves[m][p]``: gradient of parameter p in micro-batch m. ``counts[m]``: its number of items.
    """

    leaves: Sequence[Grads]
    counts: Sequence[int]
    in_blocks: bool = True

    def expected(self) -> Grads:
        return [reduced(column, sum(self.counts)) for column in zip(*self.leaves, strict=True)]


def wrap_reproducible(parameters: Sequence[torch.Tensor], **options: object) -> LegacyDistributedDataParallel:
    return LegacyDistributedDataParallel(
        module_of(parameters), reproducible=True, **{"checks": Checks(uneven="allow"), **options}
    )


def take(wrapped: LegacyDistributedDataParallel, window: Window, rank: int, world_size: int) -> Grads:
    """Collective: bring this rank's share of the micro-batches; what the call leaves."""
    each = len(window.leaves) // world_size
    mine = range(rank * each, (rank + 1) * each)
    for number in mine:
        if window.in_blocks or number != mine[-1]:
            with wrapped.no_sync():
                bring(wrapped.module, window.leaves[number])
        else:
            bring(wrapped.module, window.leaves[number])
    wrapped.all_reduce(sample_size=sum(window.counts[number] for number in mine))
    return get_gradients(wrapped.module)


def bring(module: nn.Module, grads: Grads) -> None:
    """Let backward add these gradients."""
    for parameter, grad in zip(module.parameters(), grads, strict=True):
        if grad is not None:
            (parameter * grad.conj()).sum().real.backward()  # of |p| this is the gradient: grad
