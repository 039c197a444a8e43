"""The mean of gradients of any dtype, shape and strides, also in pieces."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from legacy_ddp import LegacyDistributedDataParallel, SyncRecord
from legacy_ddp._call import reduce
from legacy_ddp._call.reduce import split_divisor
from tests.helpers.cases import Case, Grads, check_case, reduced_on_all, sparse_of, vectors
from tests.helpers.hosts import on_host
from tests.helpers.outcomes import kinds_of
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases

pytestmark = pytest.mark.usefixtures("transport")


@pytest.mark.unsimulated("it has no sparse tensors")
@pytest.mark.parametrize(
    "world_size, table",
    [
        # 40000 + 40000 is more than fp16 holds; 2**-24, printed as 6e-8, is its smallest number: half of it is 0.
        (2, [(40000.0, None, 40000.0), (40960.0, None, 40960.0), (2.0**-24, None, 2.0**-24), (65504.0, None, 65504.0)]),
        (4, [(30000.0, None, 30000.0), (32000.0, 16, 2000.0), (60000.0, 40000, 1.5)]),
    ],
)
def test_fp16_gradients_neither_overflow_nor_underflow(
    world_size: int, table: list[tuple[float, int | None, float]]
) -> None:
    like = [torch.zeros(2, dtype=torch.float16), torch.zeros(5, dtype=torch.float16)]
    cases: dict[Any, Case] = {}
    expected: dict[Any, Grads] = {}
    for (value, items, mean), wire in product(table, (None, torch.bfloat16, torch.float64)):
        if wire is None or torch.tensor(value * world_size).to(wire).double() == value * world_size:
            own, quotient = (torch.tensor([number, -number], dtype=torch.float16) for number in (value, mean))
            grads: list[Grads] = [[own, sparse_of([0, 3], own)]] * world_size
            cases[value, wire] = Case(like, grads, [{"sample_size": items}] * world_size, {"reduce_dtype": wire})
            expected[value, wire] = [quotient, sparse_of([0, 3], quotient)]

    check_case(cases, expected)


@pytest.mark.parametrize("size, value", [(64, 2000.0), (512, 2000.0), (3, 30000.0), (7, 35000.0), (64, 2.0**-20)])
def test_fp16_divisor_split_keeps_the_sum_of_many_ranks_in_range(size: int, value: float) -> None:
    before, after = split_divisor(size, size, torch.float16)
    total = torch.zeros((), dtype=torch.float16)
    for _ in range(size):
        total += torch.tensor(value, dtype=torch.float16) / before

    assert before * after == size
    # Each of the additions rounds by half an ulp at most.
    torch.testing.assert_close((total.float() / after).item(), value, rtol=size * 2**-11, atol=0)
    assert split_divisor(size, size, torch.float32) == (1.0, size)


def test_reduce_dtype_costs_no_more_than_its_own_rounding() -> None:
    base = [torch.rand(50, generator=torch.Generator().manual_seed(rank)) + 1 for rank in range(4)]
    grads_of = {  # by number of items: they fit fp16, and so does the mean
        (dtype, tokens): [(grad * (300.0 if tokens is None else 30_000.0)).to(dtype) for grad in base]
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for tokens in (None, 100_000)
    }
    cases = {
        (dtype, wire, tokens): Case(
            [torch.zeros(50, dtype=dtype)],
            [[grad] for grad in grads],
            [{"sample_size": tokens}] * 4,
            {"reduce_dtype": wire},
        )
        for (dtype, tokens), grads in grads_of.items()
        for wire in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    }

    for label, (result,) in reduced_on_all(cases).items():
        dtype, wire, tokens = label
        exact = torch.stack([grad.double() for grad in grads_of[dtype, tokens]]).sum(0) / (4 * (tokens or 1))
        assert result.dtype == dtype
        # Four roundings on the wire (the cast and three additions) and two of the result, half an ulp each.
        rtol = 2 * torch.finfo(wire).eps + torch.finfo(dtype).eps
        assert torch.allclose(result.double(), exact, rtol=rtol, atol=0), label


def test_reduce_dtype_is_what_travels(transport: str) -> None:
    """In shared memory nothing travels, and a narrower dtype rounds nothing."""
    cancelling = vectors([1e8], [1.0], [-1e8], [3.0])  # fp32 loses the 1 or the 3
    fine: list[Grads] = [[torch.tensor([1.001])]] * 4
    complex_ones: list[Grads] = [[torch.tensor([1.001 + 1e5j])]] * 4

    check_case(
        {
            "wide": Case([torch.zeros(1)], cancelling, options={"reduce_dtype": torch.float64}),
            "narrow": Case([torch.zeros(1)], fine, options={"reduce_dtype": torch.bfloat16}),
            "complex travels as it is": Case(
                [torch.zeros(1, dtype=torch.complex64)], complex_ones, options={"reduce_dtype": torch.float16}
            ),
        },
        {
            "wide": [torch.ones(1)],
            "narrow": fine[0] if transport == "host" else [torch.ones(1)],
            "complex travels as it is": complex_ones[0],
        },
    )


# Shapes and strides


PLANE = torch.arange(12.0).reshape(3, 4)
PARAMETERS = {
    "contiguous": torch.zeros(3, 4),
    "transposed": torch.zeros(4, 3).t(),
    "sliced": torch.zeros(3, 8)[:, ::2],
    "expanded": torch.zeros(3, 1).expand(3, 4),
}
GRADIENTS = [
    PLANE,
    PLANE.t().contiguous().t(),
    PLANE.repeat_interleave(2, dim=1)[:, ::2],
    torch.arange(3.0)[:, None].expand(3, 4),
    torch.arange(6.0).as_strided((3, 4), (1, 1)),  # elements share memory
]


def test_strides_of_parameters_and_gradients_do_not_matter() -> None:
    # All gradient strides at once, another one on each rank.
    count = len(GRADIENTS)
    grads: list[Grads] = [[GRADIENTS[(index + rank) % count] for index in range(count)] for rank in range(2)]
    mean: Grads = [(GRADIENTS[index] + GRADIENTS[(index + 1) % count]) / 2 for index in range(count)]

    check_case(
        {name: Case([like] * count, grads) for name, like in PARAMETERS.items()}, dict.fromkeys(PARAMETERS, mean)
    )


_COMPLEX = torch.complex(torch.tensor([math.inf, 0.0, 3.0]), torch.tensor([0.0, -math.inf, 6.0]))
_COMPLEX_PATHS: dict[str, dict[str, Any]] = {
    "default": {},
    "gloo": {"transport": "gloo"},
    "without views": {"gradient_as_bucket_view": False},
    "reproducible": {"reproducible": True},
    "reproducible over gloo": {"reproducible": True, "transport": "gloo"},
    "hook": {},
    "sparse": {},
}


def _complex_means(rank: int, hosts: str) -> dict[str, list[list[float]]]:
    """The parts of every element; the last rank has the gradient, and the other ranks have zeros."""
    found = {}
    for name, arguments in _COMPLEX_PATHS.items():
        with on_host(hosts[rank]):
            model = LegacyDistributedDataParallel(
                nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.complex64))]), checks="off", **arguments
            )
            if name == "hook":
                model.register_comm_hook(None, allreduce_hook)
            (parameter,) = model.parameters()
            grad = _COMPLEX.clone() if rank == len(hosts) - 1 else torch.zeros_like(_COMPLEX)
            if name == "sparse":
                indices = torch.arange(3)[None]
                grad = torch.sparse_coo_tensor(indices, grad, (3,), is_coalesced=True, check_invariants=True)
            parameter.grad = grad
            model.all_reduce(sample_size=3)
        reduced = parameter.grad.values() if parameter.grad.is_sparse else parameter.grad
        found[name] = torch.view_as_real(reduced).tolist()
    return found


@pytest.mark.unsimulated("it has no sparse tensors")
@pytest.mark.parametrize("hosts", ["a", "aabb"])
def test_the_parts_of_a_complex_number_are_divided_apart(hosts: str) -> None:
    """A division of a complex number by a complex number makes inf + nan j of inf + 0 j."""
    ranks = len(hosts)

    for found in run_ranks(_complex_means, ranks, hosts):
        for path in _COMPLEX_PATHS:
            assert found[path] == [[math.inf, 0.0], [0.0, -math.inf], [1.0 / ranks, 2.0 / ranks]], path


_LARGE: dict[tuple[torch.dtype, Any, torch.dtype | None], float] = {
    (dtype, way, reduce_dtype): 2.0**127 if reduce_dtype else math.inf
    for dtype in (torch.bfloat16, torch.float32)
    for way in ("host", "gloo")
    for reduce_dtype in (None, torch.float64)
}


@on_ranks(2, [list(_LARGE.values())] * 2)
def test_the_sum_and_not_the_mean_has_to_be_in_the_range_of_the_dtype_of_sums(rank: int) -> list[float]:
    """As docs/transport.md says: 2 * 2**127 is beyond the range of bf16 and of fp32, and their mean is not."""
    found = []
    for dtype, transport, reduce_dtype in _LARGE:
        model = LegacyDistributedDataParallel(
            nn.ParameterList([nn.Parameter(torch.zeros(1, dtype=dtype))]),
            checks="off",
            transport=transport,
            reduce_dtype=reduce_dtype,
        )
        (parameter,) = model.parameters()
        parameter.grad = torch.full((1,), 2.0**127, dtype=dtype)
        model.all_reduce()
        found.append(float(parameter.grad))
    return found


# Number of collectives per bucket; every element is divided once


def _reduce_once(rank: int, smallest_bytes: int, numel: int, options: dict[str, Any]) -> tuple[int, int, list[float]]:
    """Collectives, bytes handed over, and the mean of ones and threes."""
    reduce.SMALLEST_PIECE_BYTES = smallest_bytes
    net = nn.ParameterList([nn.Parameter(torch.zeros(numel - 2)), nn.Parameter(torch.zeros(2))])
    wrapped = LegacyDistributedDataParallel(net, checks="off", **options)
    for parameter in net:
        parameter.grad = torch.full_like(parameter, 1.0 + 2 * rank)
    records: list[SyncRecord] = []
    kinds = kinds_of(lambda: records.append(wrapped.all_reduce()))
    means = torch.cat([parameter.grad for parameter in net]).unique().tolist()
    return kinds.count("allreduce"), records[0].payload_bytes, means


# The smallest piece in bytes, the size of the bucket, the settings, and the collectives of both buckets.
_PIECES: list[tuple[int, int, dict[str, Any], int]] = [
    (16, 8, {}, 2),
    (16, 9, {}, 2),
    (16, 7, {}, 2),  # 4 and 3
    (32, 8, {}, 1),  # a half would be too small
    (20, 9, {}, 2),
    (16, 100, {}, 2),  # never more than two
    (16, 12, {"buffer_size": 5}, 3),
    (16, 12, {"buffer_size": 100}, 2),
    (16, 12, {"reduce_dtype": torch.bfloat16}, 2),  # 8 and 4: what travels is counted
]


@pytest.mark.parametrize("transport", ["gloo"], indirect=True)
def test_a_large_bucket_travels_in_two_halves(transport: str) -> None:
    cases = {str(case): case[:3] for case in _PIECES}
    expected = {str(case): (case[3], case[1] * (2 if "reduce_dtype" in case[2] else 4), [2.0]) for case in _PIECES}

    assert run_cases(_reduce_once, 2, cases, fresh=True) == {name: [found] * 2 for name, found in expected.items()}
