"""Gradients of every dtype and of many sizes, known on all ranks, and the sums that differ from sums by hand."""

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.small_sizes import DEFAULT_CHUNK_NUMEL

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
SIZES = (1, 63, 64, 65, 4096, 3 * DEFAULT_CHUNK_NUMEL + 7)


def every_dtype() -> nn.ParameterList:
    """A parameter of each dtype and size."""
    return nn.ParameterList([nn.Parameter(torch.zeros(numel, dtype=dtype)) for dtype, numel in product(DTYPES, SIZES)])


def known_grad(rank: int, index: int, parameter: torch.Tensor, step: int) -> torch.Tensor:
    """The gradient of a rank for the parameter with this index."""
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
