"""Sums in memory shared by the ranks of a host: bit for bit the sum in rank order, in the documented dtype."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, all_reduce_gradients
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import run_cases
from tests.helpers.sums import every_dtype, wrong_sums
from tests.helpers.tiers import thorough

STEPS = 10


def _sum_in_rank_order(
    grads: Sequence[torch.Tensor], divisor: int, reduce_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """In fp32 or wider, as docs/transport.md says, and rounded once; complex gradients are pairs of real numbers."""
    dtype = grads[0].dtype
    if dtype.is_complex:
        return torch.view_as_complex(_sum_in_rank_order([torch.view_as_real(grad) for grad in grads], divisor))
    wide = torch.float64 if torch.float64 in (dtype, reduce_dtype) else torch.float32
    total = grads[0].to(wide)
    for grad in grads[1:]:
        total = total + grad.to(wide)
    return (total / divisor).to(dtype)


def _sums(rank: int, world_size: int, reduce_dtype: torch.dtype | None) -> tuple[set[str], list[str]]:
    model = LegacyDistributedDataParallel(every_dtype(), reduce_dtype=reduce_dtype, checks="off")
    expected = partial(_sum_in_rank_order, divisor=world_size, reduce_dtype=reduce_dtype)
    return wrong_sums(model, rank, world_size, expected, steps=2)


@pytest.mark.parametrize(
    "world_size, reduce_dtypes",
    [(2, [None]), (3, [torch.float16, torch.bfloat16, torch.float32, torch.float64]), thorough(5, [None])],
)
@pytest.mark.parametrize("transport", ["host"], indirect=True)
def test_every_dtype_and_size_is_summed_in_rank_order_in_the_documented_dtype(
    transport: str, world_size: int, reduce_dtypes: list[torch.dtype | None]
) -> None:
    found = run_cases(_sums, world_size, {str(each): (world_size, each) for each in reduce_dtypes})
    assert found == {str(each): [({"host"}, [])] * world_size for each in reduce_dtypes}


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


def _without_a_wrapper(rank: int) -> tuple[list[str], list[float]]:
    net = nn.Linear(2, 1, bias=False)
    transports, means = [], []
    for step in range(3):
        net.zero_grad()
        (net.weight * float(rank + step)).sum().backward()
        transports.append(all_reduce_gradients(net).transport)
        means += net.weight.grad.flatten().unique().tolist()
    return transports, means


@pytest.mark.parametrize("transport", ["host"], indirect=True)
def test_the_function_uses_shared_memory_from_its_first_call_on(transport: str) -> None:
    """The ranks know that they share a host before the gradients are packed."""
    assert run_ranks(_without_a_wrapper, 2) == [(["host"] * 3, [0.5, 1.5, 2.5])] * 2


def _kept(rank: int, keeps: tuple[int, ...]) -> tuple[list[float], list[float], bool, int]:
    """What gradients kept in every step hold at the end, the last means, whether they can be copied and saved, and the
    number of segments that this rank maps."""
    net = nn.Linear(2, 1, bias=False)
    model = LegacyDistributedDataParallel(net, transport="host")
    kept, means = [], []
    for step in range(STEPS):
        model.zero_grad()
        (net.weight * float(rank + step)).sum().backward()
        model.all_reduce()
        means += net.weight.grad.flatten().unique().tolist()
        if rank in keeps:
            kept.append(net.weight.grad)
    segments = Path("/proc/self/maps").read_text().count("/memfd:legacy_ddp")
    return [grad.unique().item() for grad in kept], means, net.weight.grad.is_shared(), segments


@pytest.mark.parametrize("transport", ["host"], indirect=True)
def test_gradients_kept_on_one_rank_do_not_pile_up_on_the_others(transport: str) -> None:
    own, keeper = (segments for *_, segments in run_ranks(_kept, 2, (1,)))
    assert own <= 2 + 3  # its own, and of the other rank the current one, a spare and a new one
    assert keeper >= STEPS


@pytest.mark.parametrize("transport", ["host"], indirect=True)
def test_a_gradient_kept_on_some_ranks_is_never_written_to(transport: str) -> None:
    expected = [0.5 + step for step in range(STEPS)]
    keepers = {str(keeps): (keeps,) for keeps in ((), (0,), (1,), (0, 1))}
    for name, of_ranks in run_cases(_kept, 2, keepers).items():
        for rank, (kept, means, is_shared, _) in enumerate(of_ranks):
            assert means == expected
            assert kept == (expected if rank in keepers[name][0] else [])
            assert not is_shared  # torch.multiprocessing would send a handle and not a copy


MOST = 2**62 - 1  # the largest sample_size
ITEMS = ([1, 0, 0, 0, 0], [1, 0, 2, 0, 0], [2**40, 0, 0, 0, 0], [5, 7, 0, 11, 2], [MOST] * 5)


def _divided(rank: int) -> list[list[float]]:
    model = LegacyDistributedDataParallel(nn.Linear(3, 1, bias=False).double(), transport="host", checks="off")
    weight, found = model.module.weight, []
    for sizes in ITEMS:
        weight.grad = torch.full_like(weight, 7.0 if rank == 0 else 0.0)
        model.all_reduce(sample_size=sizes[rank])
        found.append(weight.grad.flatten().tolist())
    return found


@pytest.mark.parametrize("transport", ["host"], indirect=True)
def test_a_sum_is_divided_by_any_number_of_items(transport: str) -> None:
    """Sample sizes of several ranks may exceed 64 bits together."""
    assert run_ranks(_divided, 5) == [[[7.0 / sum(sizes)] * 3 for sizes in ITEMS]] * 5
