"""Sums by hand: gradients of every dtype and of many sizes, micro-batches in a tree, and the sums of a host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers import cases
from tests.helpers.cases import Grads, get_gradients, module_of
from tests.helpers.small_sizes import DEFAULT_CHUNK_NUMEL, sum_chunks_of


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


def add_leaf(wrapped: LegacyDistributedDataParallel, value: float = 1.0) -> None:
    """A micro-batch in a block of its own, whose gradients are full of ``value``."""
    with wrapped.no_sync():
        bring(wrapped.module, [torch.full_like(parameter, value) for parameter in wrapped.module.parameters()])


# Micro-batches with gradients of every dtype and of many sizes

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
SIZES = (1, 63, 65, 1000)
CHUNK = 64  # many chunks in a small tensor


def mixed_window(seed: int, count: int, items: Sequence[int] | None = None, *, in_blocks: bool = True) -> Window:
    """Random gradients of many magnitudes, negative zeros, and a gradient missing here and there."""
    generator = torch.Generator().manual_seed(seed)
    leaves: list[list[torch.Tensor | None]] = []
    for number in range(count):
        grads: list[torch.Tensor | None] = []
        for index, (dtype, numel) in enumerate((dtype, numel) for dtype in DTYPES for numel in SIZES):
            values = torch.randn(numel, 2, generator=generator, dtype=torch.float64)
            values *= 2.0 ** torch.randint(-12, 6, values.shape, generator=generator)
            values[::7] = -0.0
            own = torch.view_as_complex(values) if dtype.is_complex else values[:, 0].contiguous()
            grads.append(None if (number + index + seed) % 5 == 0 else own.to(dtype))
        leaves.append(grads)
    return Window(leaves, items or [3] * count, in_blocks=in_blocks)


def counted(window: Window) -> Window:
    """The same step, without the gradients of micro-batches of 0 items."""
    leaves = [leaf if count else [None] * len(leaf) for leaf, count in zip(window.leaves, window.counts, strict=True)]
    return Window(leaves, window.counts)


def mixed_model(**options: Any) -> LegacyDistributedDataParallel:
    sum_chunks_of(CHUNK)
    return wrap_reproducible([torch.ones(numel, dtype=dtype) for dtype in DTYPES for numel in SIZES], **options)


# Gradients that are known on all ranks, and the sums that differ from sums by hand

SUMMED_SIZES = (1, 63, 64, 65, 4096, 3 * DEFAULT_CHUNK_NUMEL + 7)


def every_dtype() -> nn.ParameterList:
    return nn.ParameterList(
        [nn.Parameter(torch.zeros(numel, dtype=dtype)) for dtype, numel in product(cases.DTYPES, SUMMED_SIZES)]
    )


def known_grad(rank: int, index: int, parameter: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * index + step)
    return torch.randn(parameter.numel(), generator=generator, dtype=torch.float64).mul_(3.0).to(parameter.dtype)


def wrong_sums(
    model: LegacyDistributedDataParallel,
    rank: int,
    world_size: int,
    expected: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    *,
    steps: int,
) -> tuple[set[str], list[str]]:
    """Collective: the transports, and the parameters of :func:`every_dtype` with other sums than ``expected``.

    ``expected``: of the gradients of all ranks.
    """
    parameters, transports, wrong = list(model.parameters()), set(), []
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            parameter.grad = known_grad(rank, index, parameter, step)
        transports.add(model.all_reduce().transport)
        for index, parameter in enumerate(parameters):
            grads = [known_grad(other, index, parameter, step) for other in range(world_size)]
            if parameter.grad is None or not torch.equal(parameter.grad, expected(grads)):
                wrong.append(f"step {step}, {parameter.dtype} {parameter.numel()}")
    return transports, wrong
