"""Sums over several hosts: bit for bit the sum over the ranks of each host in rank order, then over the hosts.

The ranks claim to run on the hosts in ``hosts``, a letter per rank.
"""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.hosts import on_host
from tests.helpers.ranks import run_ranks
from tests.helpers.sums import every_dtype, wrong_sums
from tests.helpers.tiers import thorough

RANGE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # ascending
pytestmark = pytest.mark.parametrize("transport", ["host"], indirect=True)


def _model(rank: int, hosts: str, parameters: nn.Module, **arguments: object) -> LegacyDistributedDataParallel:
    with on_host(hosts[rank]):
        return LegacyDistributedDataParallel(parameters, transport="host", **arguments)


def _sum_over_two_hosts(grads: Sequence[torch.Tensor], hosts: str, reduce_dtype: torch.dtype | None) -> torch.Tensor:
    """Of every host in rank order, at least in fp32; then of both in the dtype between hosts; then the mean.

    fp16 between hosts is divided by the power of two next to the square root of 4, the number of ranks, before the sum.
    """
    dtype = grads[0].dtype
    if dtype.is_complex:
        pairs = [torch.view_as_real(grad) for grad in grads]
        return torch.view_as_complex(_sum_over_two_hosts(pairs, hosts, None))
    carried = reduce_dtype or (torch.float32 if dtype == torch.float16 else dtype)
    is_wide = torch.float64 in (dtype, carried)
    totals: dict[str, torch.Tensor] = {}
    for host, grad in zip(hosts, grads, strict=True):
        wide = grad.double() if is_wide else grad.float()
        totals[host] = totals[host] + wide if host in totals else wide
    before = 2.0 if carried == torch.float16 else 1.0
    first, second = ((total / before).to(carried) for total in totals.values())
    total, after = first + second, len(grads) / before
    return total.to(dtype) / after if RANGE.index(carried) < RANGE.index(dtype) else (total / after).to(dtype)


def _sums(
    rank: int, hosts: str, buffer_size: int, reduce_dtype: torch.dtype | None = None
) -> tuple[set[str], list[str]]:
    model = _model(rank, hosts, every_dtype(), checks="off", buffer_size=buffer_size, reduce_dtype=reduce_dtype)
    expected = partial(_sum_over_two_hosts, hosts=hosts, reduce_dtype=reduce_dtype)
    return wrong_sums(model, rank, len(hosts), expected, steps=3)


@pytest.mark.parametrize("hosts, buffer_size", [("abab", 2**28), ("aabb", 10_000)])
def test_every_dtype_and_size_is_summed_per_host_and_then_over_the_hosts(
    transport: str, hosts: str, buffer_size: int
) -> None:
    assert run_ranks(_sums, len(hosts), hosts, buffer_size) == [({"host"}, [])] * len(hosts)


@pytest.mark.parametrize("reduce_dtype", [torch.float16, thorough(torch.bfloat16), thorough(torch.float64)])
def test_between_hosts_gradients_have_the_dtype_that_was_asked_for(transport: str, reduce_dtype: torch.dtype) -> None:
    assert run_ranks(_sums, 4, "abab", 2**28, reduce_dtype) == [({"host"}, [])] * 4


def _whole(generator: torch.Generator, numel: int) -> torch.Tensor:
    """Whole numbers: their sums are exact in any order, also of three hosts."""
    return torch.randint(-1000, 1000, (numel,), generator=generator).float()


def _absent(rank: int, hosts: str, seed: int) -> list[str]:
    """Ranks lack other gradients in every step, are left out, or pass sample sizes; compared with sums by hand."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [17, 200_000, 3, 70_000, 1]
    parameters = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for numel in sizes])
    model = _model(rank, hosts, parameters)
    wrong = []
    for step in range(6):
        has = torch.rand(len(hosts), len(sizes), generator=generator) < (1.0 if step == 3 else 0.5)
        samples = [0] * len(hosts) if step == 4 else torch.randint(0, 3, (len(hosts),), generator=generator).tolist()
        grads = [[_whole(generator, numel) for numel in sizes] for _ in hosts]
        if rank == step % len(hosts):
            torch.randn(500_000).sort()  # late: the others are in the payload before it
        for index, parameter in enumerate(parameters):
            parameter.grad = grads[rank][index].clone() if has[rank, index] else None
        model.all_reduce(sample_size=samples[rank])
        for index, parameter in enumerate(parameters):
            brought = [grads[other][index] for other in range(len(hosts)) if samples[other] and has[other, index]]
            if (parameter.grad is None) != (not brought) or not (
                parameter.grad is None or torch.equal(parameter.grad, torch.stack(brought).sum(0) / sum(samples))
            ):
                wrong.append(f"step {step}, parameter {index}")
    return wrong


@pytest.mark.parametrize("hosts, seed", [("aaa", 6), ("abbaab", 2), thorough("abccba", 3)])
def test_slots_without_a_gradient_on_some_ranks_count_as_zeros_on_all_hosts(
    transport: str, hosts: str, seed: int
) -> None:
    """Hosts with equal masks on their own ranks wait, too: the masks of all ranks decide."""
    assert run_ranks(_absent, len(hosts), hosts, seed) == [[]] * len(hosts)


def _in_half(rank: int, hosts: str) -> list[float]:
    """Means of fp16 gradients that are large and small, and of 70,000 on rank 1, which is no number of fp16."""
    halves, single = nn.ParameterList([torch.zeros(3).half(), torch.zeros(3).half()]), nn.Linear(2, 1, bias=False)
    models = _model(rank, hosts, halves), _model(rank, hosts, single, reduce_dtype=torch.float16)
    halves[0].grad, halves[1].grad = torch.full((3,), 40_000.0).half(), torch.full((3,), 6e-8).half()
    single.weight.grad = torch.full((1, 2), 70_000.0 if rank == 1 else 0.0)
    assert {model.all_reduce().transport for model in models} == {"host"}
    return [float(parameter.grad.unique()) for parameter in (*halves, single.weight)]


def test_half_precision_overflows_and_underflows_nowhere_on_the_way(transport: str) -> None:
    means = [40_000.0, float(torch.tensor(6e-8).half()), 17_504.0]  # 35,000 is 35,008 in fp16
    assert run_ranks(_in_half, 4, "aabb") == [means] * 4


def _kept(rank: int, hosts: str) -> tuple[list[float], list[float]]:
    """What gradients kept in every step on rank 2 hold at the end, and all means."""
    net = nn.Linear(2, 1, bias=False)
    model = _model(rank, hosts, net)
    kept, means = [], []
    for step in range(6):
        model.zero_grad()
        (net.weight * float(rank + step)).sum().backward()
        model.all_reduce()
        means += net.weight.grad.flatten().unique().tolist()
        kept += [net.weight.grad] if rank == 2 else []
    return [grad.unique().item() for grad in kept], means


def test_a_gradient_kept_on_one_rank_is_never_written_to_and_no_other_host_waits(transport: str) -> None:
    """Only one host has new segments in a call: all hosts decide alike whether they are exchanged."""
    expected = [1.5 + step for step in range(6)]
    for rank, (kept, means) in enumerate(run_ranks(_kept, 4, "aabb")):
        assert means == expected
        assert kept == (expected if rank == 2 else [])
