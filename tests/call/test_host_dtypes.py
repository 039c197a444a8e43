"""Sums in shared memory with ``reduce_dtype``: in fp32 or wider, and no copy for sending is kept."""

from itertools import product

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.shared_jobs import run_cases

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*REAL, torch.complex64, torch.complex128)
# The dtype of the sums, as docs/transport.md has it. Complex gradients: of both parts.
SUMS = {
    (grad, reduce): torch.float64 if torch.float64 in (grad, reduce) else torch.float32
    for grad, reduce in product(REAL, (None, *REAL))
} | {
    (grad, reduce): torch.float32 if grad == torch.complex64 else torch.float64
    for grad, reduce in product((torch.complex64, torch.complex128), (None, *REAL))
}
RANKS = 3


def _grad(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = (
        torch.randn(2000, 2, generator=generator, dtype=torch.float64) * 2.0 ** torch.arange(-5, 5).repeat(200)[:, None]
    )
    return (torch.view_as_complex(values) if dtype.is_complex else values[:, 0].contiguous()).to(dtype)


def _mean_by_hand(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.Tensor:
    """In rank order, one rounding at the end."""
    grads = [_grad(rank, dtype) for rank in range(RANKS)]
    real = [torch.view_as_real(grad) if dtype.is_complex else grad for grad in grads]
    total = real[0].to(SUMS[dtype, reduce_dtype])
    for grad in real[1:]:
        total = total + grad.to(total.dtype)
    mean = (total / RANKS).to(real[0].dtype)
    return torch.view_as_complex(mean) if dtype.is_complex else mean


def _wrong(rank: int, reduce_dtype: torch.dtype | None) -> tuple[str, list[torch.dtype]]:
    """The transport, and the dtypes whose mean is not the mean by hand."""
    net = nn.ParameterList([nn.Parameter(torch.zeros(2000, dtype=dtype)) for dtype in DTYPES])
    model = LegacyDistributedDataParallel(net, reduce_dtype=reduce_dtype, checks="off")
    wrong = []
    for _ in range(2):
        for parameter in net:
            parameter.grad = _grad(rank, parameter.dtype)
        record = model.all_reduce()
        wrong += [
            parameter.dtype
            for parameter in net
            if not torch.equal(parameter.grad, _mean_by_hand(parameter.dtype, reduce_dtype))
        ]
    return record.transport, wrong


@pytest.mark.parametrize("transport", ["host"], indirect=True)
def test_sums_are_made_in_the_documented_dtype(transport: str) -> None:
    found = run_cases(_wrong, RANKS, {str(reduce_dtype): (reduce_dtype,) for reduce_dtype in (None, *REAL)})
    assert found == dict.fromkeys(found, [("host", [])] * RANKS)


def _copies(rank: int, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> list[bool]:
    """Whether a copy for sending is there after each call."""
    net = nn.ParameterList([nn.Parameter(torch.zeros(8, dtype=dtype))])
    model = LegacyDistributedDataParallel(net, reduce_dtype=reduce_dtype, checks="off")
    found = []
    for _ in range(3):
        net[0].grad = torch.full((8,), 1.0 + rank, dtype=dtype)
        model.all_reduce()
        assert net[0].grad.tolist() == [1.5] * 8
        found.append(model._synchronizer.planner._known.buffers[0].wire is not None)
    return found


def test_no_copy_for_sending_is_kept_where_memory_is_shared(transport: str) -> None:
    """The first call makes its copy before the transport is chosen."""
    cases = {"fp16": (torch.float16, None), "wider": (torch.float32, torch.float64)}
    kept = [True, False, False] if transport == "host" else [True] * 3
    assert run_cases(_copies, 2, cases) == dict.fromkeys(cases, [kept] * 2)
