"""Do all ranks end with the gradients that one process, holding all of them, would compute?"""

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from legacy_ddp import (
    AgreedError,
    Checks,
    DesyncError,
    GradientError,
    LegacyDDPError,
    LegacyDistributedDataParallel,
    PeerError,
    SyncRecord,
    all_reduce_gradients,
)
from legacy_ddp._reduce import split_divisor
from tests.ranks import run_ranks

Grads = list[torch.Tensor | None]
Part = dict[str, Any]  # the arguments of all_reduce() on one rank

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
SKIP: Part = {"skip": True}


def _module(parameters: Sequence[torch.Tensor]) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(tensor, requires_grad=tensor.dtype in DTYPES) for tensor in parameters])


def _wrap(parameters: Sequence[torch.Tensor], **options: Any) -> LegacyDistributedDataParallel:
    return LegacyDistributedDataParallel(_module(parameters), **{"checks": Checks(uneven="allow"), **options})


def _set(wrapped: LegacyDistributedDataParallel, grads: Grads) -> None:
    for parameter, grad in zip(wrapped.module.parameters(), grads, strict=True):
        parameter.grad = grad


def _get(module: nn.Module) -> Grads:
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def _bits(tensor: torch.Tensor | None) -> object:
    if tensor is None:
        return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return "sparse", tensor.shape, _bits(tensor.indices()), _bits(tensor.values())
    return tensor.dtype, tensor.shape, bytes(tensor.resolve_conj().reshape(-1).view(torch.uint8).tolist()).hex()


def _all_bits(grads: Grads) -> list[object]:
    return [_bits(grad) for grad in grads]


@dataclass(frozen=True)
class Case:
    """One module and what every rank brings to one call on it."""

    parameters: Sequence[torch.Tensor]
    grads: Sequence[Grads]
    parts: Sequence[Part] = ({}, {}, {}, {})
    options: Mapping[str, Any] = field(default_factory=dict)


def _call_once(cases: Sequence[Case], rank: int) -> list[tuple[Grads, list[tuple[int, ...]]]]:
    results = []
    for case in map(copy.deepcopy, cases):  # a call may write into the gradients it was given
        wrapped = _wrap(case.parameters, **case.options)
        _set(wrapped, case.grads[rank])
        wrapped.all_reduce(**case.parts[rank])
        dense = [p.grad for p in wrapped.parameters() if p.grad is not None and not p.grad.is_sparse]
        results.append((_get(wrapped), [grad.stride() for grad in dense]))
    return results


def _reduced_all(cases: Mapping[Any, Case]) -> dict[Any, Grads]:
    """The gradients after one call for each case, once it is sure that all ranks hold the same bits."""
    (world_size,) = {len(case.grads) for case in cases.values()}
    results = run_ranks(partial(_call_once, list(cases.values())), world_size)
    for label, *of_ranks in zip(cases, *results, strict=True):
        for grads, _ in of_ranks[1:]:
            assert _all_bits(grads) == _all_bits(of_ranks[0][0]), label
    return {label: grads for label, (grads, _) in zip(cases, results[0], strict=True)}


def _reduced(
    parameters: Sequence[torch.Tensor], grads: Sequence[Grads], parts: Sequence[Part] = Case.parts, **options: Any
) -> Grads:
    return _reduced_all({"": Case(parameters, grads, parts, options)})[""]


def _both_ways(cases: Mapping[Any, Case]) -> dict[Any, Case]:
    """Each case with gradients as views and without."""
    return {
        (label, as_view): replace(case, options={**case.options, "gradient_as_bucket_view": as_view})
        for label, case in cases.items()
        for as_view in (True, False)
    }


def _check(cases: Mapping[Any, Case], expected: Mapping[Any, Grads]) -> None:
    """Each case gives, bit for bit, what is expected of it, with views and without."""
    found = {label: _all_bits(grads) for label, grads in _reduced_all(_both_ways(cases)).items()}
    assert found == {(label, as_view): _all_bits(expected[label]) for label, as_view in found}


def _error(call: Callable[[], object]) -> tuple[type[LegacyDDPError], str]:
    with pytest.raises(LegacyDDPError) as caught:
        call()
    return caught.type, str(caught.value)


def _vectors(*values: Sequence[float], dtype: torch.dtype = torch.float32) -> list[Grads]:
    """One parameter: a gradient per rank."""
    return [[torch.tensor(value, dtype=dtype)] for value in values]


def _cast(grads: list[Grads], dtype: torch.dtype) -> list[Grads]:
    return [[grad if grad is None else grad.to(dtype) for grad in of_rank] for of_rank in grads]


def _sparse(rows: Sequence[int], values: torch.Tensor, size: int = 5) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (size, *values.shape[1:]), check_invariants=True)


# --- what a call means ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_plain_call_leaves_the_mean_on_every_rank(world_size: int) -> None:
    grads = _vectors(*([6.0 * (rank + 1), -2.0 * (rank + 1)] for rank in range(world_size)))

    # Small integers whose sum world_size divides: exact in every dtype.
    cases = {dtype: Case([torch.zeros(2, dtype=dtype)], _cast(grads, dtype)) for dtype in DTYPES}
    _check(cases, {dtype: [torch.tensor([3.0, -1.0], dtype=dtype) * (world_size + 1)] for dtype in DTYPES})


def test_only_ranks_that_take_part_count() -> None:
    grads = _vectors([6.0, 60.0], [12.0, 120.0], [18.0, 180.0])
    table: list[tuple[list[Part], float]] = [
        ([{"sample_size": 1}, {"sample_size": 2}, {"sample_size": 3}], (6 + 12 + 18) / 6),
        ([{"sample_size": 4}, {"sample_size": 0}, {"sample_size": 2}], (6 + 18) / 6),
        ([{"sample_size": 0}, {"sample_size": 0}, {"sample_size": 9}], 18 / 9),
        ([{}, SKIP, {}], (6 + 18) / 2),
        ([SKIP, SKIP, {}], 18.0),
        ([{"sample_size": 2}, {"sample_size": 7, "skip": True}, {"sample_size": 1}], (6 + 18) / 3),
    ]

    _check(
        {str(parts): Case([torch.zeros(2)], grads, parts) for parts, _ in table},
        {str(parts): [torch.tensor([value, 10 * value])] for parts, value in table},
    )


def _records(all_parts: Sequence[Sequence[Part]], rank: int) -> list[tuple[bool, SyncRecord]]:
    results = []
    for parts in all_parts:
        wrapped = _wrap([torch.zeros(3), torch.zeros(2)])
        _set(wrapped, [torch.ones(3), _sparse([0], torch.ones(1), 2)])
        record = wrapped.all_reduce(**parts[rank])
        results.append((all(p.grad is None for p in wrapped.parameters()), record))
    return results


def test_gradients_become_none_when_nobody_takes_part() -> None:
    parts: list[list[Part]] = [[SKIP, SKIP], [{"sample_size": 0}] * 2, [SKIP, {"sample_size": 0}]]
    for all_none, record in chain(*run_ranks(partial(_records, parts), 2)):
        assert all_none
        assert record.skipped
        assert record.skipped_ranks == (0, 1)


def test_record_tells_what_was_divided_by() -> None:
    parts: list[list[Part]] = [[{"sample_size": 3}, SKIP, {"sample_size": 4}], [SKIP, {}, {}]]
    for (none, weighted), (_, plain) in run_ranks(partial(_records, parts), 3):
        assert not none
        assert (weighted.skipped, weighted.sample_size, weighted.divisor) == (False, 7, 7)
        assert weighted.skipped_ranks == (1,)
        assert (plain.skipped, plain.sample_size, plain.divisor, plain.skipped_ranks) == (False, None, 2, (0,))


def test_what_a_rank_without_a_part_holds_does_not_matter() -> None:
    useless: Grads = [torch.tensor([math.nan, math.inf]), _sparse([1], torch.ones(1), 2), None, torch.ones(2)]
    useful: Grads = [*[torch.full((2,), 4.0)] * 3, None]
    parts: dict[str, list[Part]] = {"skip": [SKIP, {}], "0": [{"sample_size": 0}, {"sample_size": 2}]}

    _check(
        {label: Case([torch.zeros(2)] * 4, [useless, useful], part) for label, part in parts.items()},
        {"skip": useful, "0": [*[torch.full((2,), 2.0)] * 3, None]},
    )


def _skip_what_requires_grad(rank: int) -> Grads:
    wrapped = _wrap([torch.zeros(2)])
    wrapped.module[0].grad = torch.full((2,), 4.0)
    if rank == 0:
        wrapped.module[0].grad = torch.ones(2, requires_grad=True) * 2
    wrapped.all_reduce(skip=rank == 0)
    return _get(wrapped)


def test_rank_that_skips_may_hold_what_could_not_be_reduced() -> None:
    assert [_all_bits(grads) for grads in run_ranks(_skip_what_requires_grad, 2)] == [
        [_bits(torch.full((2,), 4.0))]
    ] * 2


def _skip_with_anything(rank: int) -> bool:
    return _wrap([torch.zeros(2)]).all_reduce(sample_size=-1, skip=True).skipped


def test_sample_size_is_not_looked_at_with_skip() -> None:
    assert run_ranks(_skip_with_anything, 1) == [True]


def _repeat_plain(rank: int) -> Grads:
    wrapped = _wrap([torch.zeros(2)])
    _set(wrapped, _vectors([1.0, 5.0], [3.0, 7.0])[rank])
    for _ in range(3):
        wrapped.all_reduce()
    return _get(wrapped)


def test_plain_call_repeated_averages_the_mean() -> None:
    assert [_all_bits(grads) for grads in run_ranks(_repeat_plain, 2)] == [[_bits(torch.tensor([2.0, 6.0]))]] * 2


def _repeat_weighted(guilty: tuple[int, ...], rank: int) -> tuple[Any, bool, Grads, Grads]:
    module = nn.Linear(2, 1, bias=False)
    wrapped = LegacyDistributedDataParallel(module, checks=Checks(uneven="allow"))
    wrapped(torch.ones(1, 2)).sum().backward()
    wrapped.all_reduce(sample_size=1)
    if rank not in guilty:
        wrapped(torch.ones(1, 2)).sum().backward()
    before = _all_bits(_get(wrapped))
    error = _error(lambda: wrapped.all_reduce(sample_size=1))
    untouched = _all_bits(_get(wrapped)) == before
    wrapped.zero_grad()
    wrapped(torch.full((1, 2), 3.0)).sum().backward()
    wrapped.all_reduce(sample_size=3)
    usable = _get(wrapped)
    wrapped.zero_grad(set_to_none=False)  # nothing to divide twice: the rank just has no batch
    wrapped.all_reduce(sample_size=1)
    return error, untouched, usable, _get(wrapped)


@pytest.mark.parametrize("guilty, expected", [((0, 1), GradientError), ((1,), PeerError)])
def test_sample_size_repeated_without_backward_is_an_error(
    guilty: tuple[int, ...], expected: type[LegacyDDPError]
) -> None:
    results = run_ranks(partial(_repeat_weighted, guilty), 2)

    assert len({error for error, _, _, _ in results}) == 1
    for (kind, text), untouched, usable, cleared in results:
        assert kind is expected
        assert "divide them a second time" in text
        assert untouched
        assert _all_bits(usable) == [_bits(torch.ones(1, 2))]
        assert _all_bits(cleared) == [_bits(torch.zeros(1, 2))]


def _mix_parts(rank: int) -> tuple[Any, bool]:
    wrapped = _wrap([torch.zeros(2)])
    _set(wrapped, [torch.ones(2)])
    error = _error(lambda: wrapped.all_reduce(**({} if rank else {"sample_size": 1})))
    return error, _all_bits(_get(wrapped)) == [_bits(torch.ones(2))]


def test_plain_and_weighted_calls_do_not_mix() -> None:
    results = run_ranks(_mix_parts, 2)

    assert results[0] == results[1]
    assert results[0][0][0] is DesyncError
    assert results[0][1]


def _edit_by_hand(rank: int) -> list[Grads]:
    wrapped = _wrap([torch.zeros(2), torch.zeros(2)])
    _set(wrapped, [torch.full((2,), 2.0 * rank), None])
    wrapped.all_reduce(sample_size=1)  # (0 + 2) / 2
    first = _get(wrapped)
    wrapped.module[0].grad.mul_(rank * 2.0)
    wrapped.module[1].grad = torch.full((2,), 6.0)
    wrapped.all_reduce(sample_size=2)  # (0 + 2) / 4 and (6 + 6) / 4
    return [first, _get(wrapped)]


def test_gradients_assigned_and_edited_by_hand_count() -> None:
    for first, second in run_ranks(_edit_by_hand, 2):
        assert _all_bits(first) == [_bits(torch.ones(2)), None]
        assert _all_bits(second) == [_bits(torch.full((2,), 0.5)), _bits(torch.full((2,), 3.0))]


def test_gradient_missing_everywhere_stays_none_and_missing_somewhere_counts_as_zeros() -> None:
    one = torch.full((2,), 4.0)
    some: list[Grads] = [[None, one, one, None, None], [None, None, one, one, None]]
    lone: list[Grads] = [[None, None, None, None, one], [None] * 5]

    _check(
        {"some": Case([torch.zeros(2)] * 5, some), "lone": Case([torch.zeros(2)] * 5, lone)},
        {"some": [None, one / 2, one, one / 2, None], "lone": [None, None, None, None, one / 2]},
    )


def test_gradients_around_an_absent_one_are_reduced() -> None:
    # Absent ones of up to 64 KiB travel as zeros, a wider one splits the run.
    gaps = (1, 16 * 1024, 16 * 1024 + 1)
    grads: list[Grads] = [[torch.ones(2), None, None], [torch.ones(2), None, torch.full((3,), 8.0)]]

    _check(
        {gap: Case([torch.zeros(2), torch.zeros(gap), torch.zeros(3)], grads) for gap in gaps},
        {gap: [torch.ones(2), None, torch.full((3,), 4.0)] for gap in gaps},
    )


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_weighted_sum_is_exact_where_it_can_be(dtype: torch.dtype) -> None:
    unit = torch.tensor([1.0, -2.0], dtype=dtype) * (1 + 2j if dtype.is_complex else 1)
    grads: list[Grads] = [[unit * 3 * (rank + 1)] for rank in range(3)]

    _check({"": Case([torch.zeros(2, dtype=dtype)], grads, [{"sample_size": n} for n in (1, 3, 5)])}, {"": [unit * 2]})


def test_first_parameters_dtype_does_not_touch_the_others() -> None:
    firsts = (torch.bfloat16, torch.float16, torch.complex64)
    grads: dict[torch.dtype, Grads] = {
        first: [
            torch.ones(2, dtype=first),
            torch.tensor([1.001, 1e5, 1e30]),
            torch.tensor([1e300, 1 + 2**-50], dtype=torch.float64),
        ]
        for first in firsts
    }

    _check(
        {
            first: Case([torch.zeros_like(g) for g in grads[first] if g is not None], [grads[first]] * 2)
            for first in firsts
        },
        grads,
    )


def test_frozen_integer_parameter_in_front_is_left_alone() -> None:
    grads: Grads = [None, torch.ones(2)]

    _check({"": Case([torch.zeros(4, dtype=torch.uint8), torch.zeros(2)], [grads] * 2)}, {"": grads})


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
            grads: list[Grads] = [[own, _sparse([0, 3], own)]] * world_size
            cases[value, wire] = Case(like, grads, [{"sample_size": items}] * world_size, {"reduce_dtype": wire})
            expected[value, wire] = [quotient, _sparse([0, 3], quotient)]

    _check(cases, expected)


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


@pytest.mark.parametrize("tokens", [None, 100_000])
def test_reduce_dtype_costs_no_more_than_its_own_rounding(tokens: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    scale = 300.0 if tokens is None else 30_000.0  # fits fp16, and so does the mean
    base = [(torch.rand(50, generator=generator) + 1) * scale for _ in range(4)]
    cases: dict[tuple[torch.dtype, torch.dtype], Case] = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for wire in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            grads: list[Grads] = [[grad.to(dtype)] for grad in base]
            parts: list[Part] = [{"sample_size": tokens}] * 4
            cases[dtype, wire] = Case([torch.zeros(50, dtype=dtype)], grads, parts, {"reduce_dtype": wire})

    for (dtype, wire), (result,) in _reduced_all(cases).items():
        exact = torch.stack([grad.to(dtype).double() for grad in base]).sum(0) / (4 * (tokens or 1))
        assert result is not None
        assert result.dtype == dtype
        # Four roundings on the wire (the cast and three additions) and two of the result, half an ulp each.
        rtol = 2 * torch.finfo(wire).eps + torch.finfo(dtype).eps
        torch.testing.assert_close(
            result.double(), exact, rtol=rtol, atol=0, msg=lambda text, label=(dtype, wire): f"{label}: {text}"
        )


def test_reduce_dtype_is_what_travels() -> None:
    cancelling = _vectors([1e8], [1.0], [-1e8], [3.0])  # fp32 loses the 1 or the 3
    fine: list[Grads] = [[torch.tensor([1.001])]] * 4
    complex_ones: list[Grads] = [[torch.tensor([1.001 + 1e5j])]] * 4

    _check(
        {
            "wide": Case([torch.zeros(1)], cancelling, options={"reduce_dtype": torch.float64}),
            "narrow": Case([torch.zeros(1)], fine, options={"reduce_dtype": torch.bfloat16}),
            "complex travels as it is": Case(
                [torch.zeros(1, dtype=torch.complex64)], complex_ones, options={"reduce_dtype": torch.float16}
            ),
        },
        {"wide": [torch.ones(1)], "narrow": [torch.ones(1)], "complex travels as it is": complex_ones[0]},
    )


# --- shapes and strides -----------------------------------------------------------------------------------------------

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

    _check({name: Case([like] * count, grads) for name, like in PARAMETERS.items()}, dict.fromkeys(PARAMETERS, mean))


def test_gradients_have_the_strides_that_torch_would_choose_for_the_parameter() -> None:
    likes = [*PARAMETERS.values(), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    cases = [Case([like], [[torch.ones(like.shape)], [torch.ones_like(like) * 3]]) for like in likes]

    for results in run_ranks(partial(_call_once, cases), 2):
        for like, (result, strides) in zip(likes, results, strict=True):
            assert _all_bits(result) == [_bits(torch.full(like.shape, 2.0))]
            assert strides == [torch.empty_like(like).stride()]


def test_scalar_and_empty_parameters_are_reduced() -> None:
    sets: list[list[tuple[int, ...]]] = [[()], [(0,)], [(0, 3)], [(), (0,), (2,), (0, 3), ()]]

    _check(
        {
            str(shapes): Case(
                [torch.zeros(shape) for shape in shapes],
                [[torch.full(shape, 2.0 * rank + 1) for shape in shapes] for rank in range(2)],
            )
            for shapes in sets
        },
        {str(shapes): [torch.full(shape, 2.0) for shape in shapes] for shapes in sets},
    )


def _frozen_only(rank: int) -> tuple[SyncRecord, list[float]]:
    module = nn.Linear(2, 2, bias=False).requires_grad_(False)
    module.weight.grad = torch.full((2, 2), float(rank))
    record = LegacyDistributedDataParallel(module).all_reduce()
    return record, module.weight.grad.flatten().tolist()


def test_module_without_trainable_parameters_is_left_alone() -> None:
    for rank, (record, grad) in enumerate(run_ranks(_frozen_only, 2)):
        assert record.payload_bytes == 0
        assert grad == [rank] * 4


def _tied(rank: int) -> tuple[list[float], int]:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    wrapped = LegacyDistributedDataParallel(module)
    module[0].weight.grad = torch.full((2, 2), 2.0 + 4 * rank)
    record = wrapped.all_reduce()
    assert module[1].weight.grad is module[0].weight.grad
    return module[0].weight.grad.flatten().tolist(), record.payload_bytes


def test_tied_parameter_is_reduced_once() -> None:
    assert run_ranks(_tied, 2) == [([4.0] * 4, 4 * 4)] * 2


# --- sparse gradients -------------------------------------------------------------------------------------------------

ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize(
    "parts, divisor", [([{}, {}, {}], 3), ([{"sample_size": n} for n in (1, 5, 2)], 8), ([{}, SKIP, {}], 2)]
)
def test_sparse_gradients_stay_sparse_and_equal_the_dense_result(parts: list[Part], divisor: int) -> None:
    sparse = [
        _sparse([0, 3], ROWS * 24),
        _sparse([3, 3], ROWS * 48),  # not coalesced
        _sparse([], torch.zeros(0, 2)),
    ]
    like = torch.zeros(5, 2)
    cases = {dtype: Case([like.to(dtype)], [[grad.to(dtype)] for grad in sparse], parts) for dtype in DTYPES}
    total = torch.zeros(5, 2)
    total[0] += ROWS[0] * 24
    total[3] += ROWS[1] * 24
    total[3] += ROWS.sum(0) * 48 if SKIP not in parts else 0

    for dtype, (result,) in _reduced_all(cases).items():
        assert result is not None
        assert result.is_sparse
        assert result.is_coalesced()
        assert _bits(result.to_dense()) == _bits((total / divisor).to(dtype))


def test_sparse_gradients_become_dense_only_where_ranks_differ() -> None:
    full, row = torch.full((5, 2), 2.0), _sparse([0, 3], ROWS)
    deep = row.to_dense().to_sparse(2)  # indices of both dimensions
    empty = _sparse([], torch.zeros(0, 2))
    scalar = torch.tensor(3.0).to_sparse()
    grads: list[Grads] = [[full, row, None, empty, deep, scalar], [row, deep, row, empty, deep, scalar]]

    results = _reduced_all(_both_ways({"": Case([*[torch.zeros(5, 2)] * 5, torch.tensor(0.0)], grads)}))

    for result in results.values():
        assert [grad is not None and grad.is_sparse for grad in result[:5]] == [False, False, True, True, True]
        assert _all_bits([grad.to_dense() for grad in result if grad is not None]) == _all_bits(
            [
                1 + row.to_dense() / 2,
                row.to_dense(),
                row.to_dense() / 2,
                torch.zeros(5, 2),
                row.to_dense(),
                torch.tensor(3.0),
            ]
        )


def _empty_sparse(rank: int) -> list[bool]:
    wrapped = _wrap([torch.zeros(0, 2)])
    seen = []
    for _ in range(3):
        _set(wrapped, [_sparse([], torch.zeros(0, 2), 0)])
        wrapped.all_reduce(sample_size=2)
        seen += [grad is not None and grad.is_sparse for grad in _get(wrapped)]
    return seen


def test_sparse_gradient_of_an_empty_parameter_is_reduced_call_after_call() -> None:
    assert run_ranks(_empty_sparse, 2) == [[True] * 3] * 2


def _embeddings(rank: int) -> list[Grads]:
    results = []
    for as_view, sparse in ((True, False), (True, True), (False, True)):
        torch.manual_seed(0)
        layers = [nn.Embedding(6, 2, sparse=sparse), nn.EmbeddingBag(6, 2, mode="sum", sparse=sparse)]
        module = nn.ModuleList(layers)
        wrapped = LegacyDistributedDataParallel(module, gradient_as_bucket_view=as_view)
        for index in ([rank, rank + 1, rank], [5, 0, 2]):  # two backwards: accumulated and not coalesced
            (layers[0](torch.tensor(index)).sum() + layers[1](torch.tensor([index])).sum() * 2).backward()
        wrapped.all_reduce(sample_size=rank + 1)
        results.append(_get(module))
    return results


def test_sparse_embeddings_get_the_gradients_of_dense_ones() -> None:
    for dense, *others in run_ranks(_embeddings, 2):
        for sparse in others:
            assert all(grad is not None and grad.is_sparse for grad in sparse)
            assert _all_bits([grad.to_dense() for grad in sparse if grad is not None]) == _all_bits(dense)


# --- gradients that cannot be reduced ---------------------------------------------------------------------------------


def _require_grad(parameter: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a reference cycle
        (parameter**3).sum().backward(create_graph=True)


def _refused(guilty: tuple[int, ...], as_view: bool, rank: int) -> tuple[Any, bool, Grads]:
    wrapped = _wrap([torch.zeros(2, 2)] * 3, gradient_as_bucket_view=as_view)
    parameters = list(wrapped.module)
    _set(wrapped, [torch.full((2, 2), float(rank)), None, None])
    wrapped.all_reduce()  # the first gradient may be a view from now on
    parameters[2].grad = torch.full((2, 2), float(rank))
    if rank in guilty:
        _require_grad(parameters[1])
    objects = [parameter.grad for parameter in parameters]
    bits = [_bits(parameter.grad.to_dense()) for parameter in parameters if parameter.grad is not None]
    error = _error(wrapped.all_reduce)
    untouched = all(parameter.grad is grad for parameter, grad in zip(parameters, objects, strict=True))
    untouched &= bits == [_bits(parameter.grad.to_dense()) for parameter in parameters if parameter.grad is not None]
    _set(wrapped, [torch.ones(2, 2), None, None])
    wrapped.all_reduce()
    return error, untouched, _get(wrapped)


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("guilty", [(1,), (0, 1)])
def test_gradient_that_requires_grad_is_refused_on_every_rank(guilty: tuple[int, ...], as_view: bool) -> None:
    results = run_ranks(partial(_refused, guilty, as_view), 2)

    assert len({error for error, _, _ in results}) == 1
    for (kind, text), untouched, later in results:
        assert kind is (PeerError if guilty == (1,) else GradientError)
        assert "'1' requires grad" in text
        assert untouched
        assert _all_bits(later) == [_bits(torch.ones(2, 2)), None, None]


def _other_dtype(grad_dtypes: Sequence[torch.dtype | None], rank: int) -> tuple[str, Grads, Grads]:
    wrapped = _wrap([torch.zeros(2, dtype=torch.bfloat16)])
    parameter = wrapped.module[0]
    parameter.grad_dtype = grad_dtypes[rank]
    parameter.grad = torch.tensor([1.001, 1e-3], dtype=grad_dtypes[rank] or torch.float32)
    try:
        wrapped.all_reduce()
        told = ""
    except AgreedError as error:
        told = type(error).__name__
    except GradientError as error:
        told = str(error)
    result = _get(wrapped)
    parameter.grad, parameter.grad_dtype = None, torch.bfloat16
    parameter.grad = torch.ones(2, dtype=torch.bfloat16)
    wrapped.all_reduce()
    return told, result, _get(wrapped)


@pytest.mark.parametrize(
    "grad_dtypes, told",
    [
        ((torch.float32, torch.float32), ""),  # asked for on every rank: reduced in that dtype
        ((torch.float32, torch.bfloat16), "LayoutError"),
        ((None, None), "has dtype torch.float32, expected torch.bfloat16"),
        ((torch.bfloat16, None), "PeerError"),
    ],
)
def test_gradient_of_another_dtype_than_its_parameter_is_never_rounded(
    grad_dtypes: Sequence[torch.dtype | None], told: str
) -> None:
    results = run_ranks(partial(_other_dtype, grad_dtypes), 2)

    for grad_dtype, (what, grads, later) in zip(grad_dtypes, results, strict=True):
        assert told in what
        assert bool(told) == bool(what)
        assert _all_bits(grads) == [_bits(torch.tensor([1.001, 1e-3], dtype=grad_dtype or torch.float32))]
        assert _all_bits(later) == [_bits(torch.ones(2, dtype=torch.bfloat16))]


# --- settings that must not change a result ---------------------------------------------------------------------------


def _odd_values(rank: int) -> Grads:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in ((3, 5), (), (7,), (2, 2))]


@pytest.mark.parametrize("world_size", [2, 3])
def test_neither_buffer_size_nor_views_nor_checks_change_the_result(world_size: int) -> None:
    grads = [_odd_values(rank) for rank in range(world_size)]
    like = [torch.zeros_like(grad) for grad in grads[0] if grad is not None]
    mean: Grads = [
        torch.stack([g.double() for g in of_ranks if g is not None]).mean(0) for of_ranks in zip(*grads, strict=True)
    ]
    options: list[dict[str, Any]] = [{}, {"checks": "off"}, *({"buffer_size": n} for n in (1, 3, 16, 2**40))]

    results = _reduced_all(_both_ways({str(option): Case(like, grads, options=option) for option in options}))

    whole = results["{}", True]
    for label, result in results.items():
        if world_size == 2:  # from three ranks on, the order of addition depends on an element's place
            assert _all_bits(result) == _all_bits(whole), label
        for grad, exact in zip(result, mean, strict=True):
            # Values of up to 3, at most three roundings of half an ulp each.
            torch.testing.assert_close(grad, exact.float() if exact is not None else None, rtol=0, atol=3 * 2**-22)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rank_leaves_a_plain_mean_bitwise_unchanged_and_divides_by_sample_size(dtype: torch.dtype) -> None:
    real = torch.tensor([1.001, -0.0, math.inf, 6e-8, 6e4, math.nan]).to(dtype)
    grads: Grads = [real, _sparse([0, 4], real[:2])]
    like = [torch.zeros(6, dtype=dtype), torch.zeros(5, dtype=dtype)]
    three: Grads = [torch.full((2,), 24.0).to(dtype), _sparse([2], torch.full((1,), 24.0).to(dtype))]
    eight: Grads = [torch.full((2,), 8.0).to(dtype), _sparse([2], torch.full((1,), 8.0).to(dtype))]

    _check(
        {
            "plain": Case(like, [grads]),
            "reduce_dtype": Case(like, [grads], options={"reduce_dtype": torch.bfloat16}),
            "sample_size": Case([torch.zeros(2, dtype=dtype), like[1]], [three], [{"sample_size": 3}]),
        },
        {"plain": grads, "reduce_dtype": grads, "sample_size": eight},
    )


def test_nan_and_infinity_stay_in_their_own_element() -> None:
    bad, good = [math.nan, 1.0, math.inf, 1.0, -math.inf], [2.0, 3.0, 2.0, math.nan, 2.0]
    sparse = [_sparse([0, 2], torch.tensor(pair), 3) for pair in ([math.nan, 1.0], [1.0, 3.0])]
    real = [dtype for dtype in DTYPES if not dtype.is_complex]
    cases = {
        dtype: Case(
            [torch.zeros(5, dtype=dtype), torch.zeros(3, dtype=dtype)],
            [[torch.tensor(row).to(dtype), part.to(dtype)] for row, part in zip((bad, good), sparse, strict=True)],
        )
        for dtype in real
    }

    for dense, scattered in _reduced_all(_both_ways(cases)).values():
        assert dense is not None
        assert scattered is not None
        assert str(dense.tolist()) == "[nan, 2.0, inf, nan, -inf]"
        assert str(scattered.to_dense().tolist()) == "[nan, 0.0, 2.0]"


# --- the function -----------------------------------------------------------------------------------------------------


def _function(form: str, rank: int) -> tuple[list[object], list[object]]:
    module, twin = (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)) for _ in range(2))
    wrapped = LegacyDistributedDataParallel(twin)
    module.load_state_dict(twin.state_dict())
    forms: dict[str, Callable[[], Any]] = {
        "module": lambda: module,
        "list": lambda: list(module.parameters()),
        "generator": module.parameters,
    }
    ours, theirs = [], []
    for step in range(4):
        for model in (module, twin):
            model.zero_grad(set_to_none=step % 2 == 0)
            F.mse_loss(model(torch.full((1, 3), float(rank + step))), torch.ones(1, 1)).backward()
        part: Part = [{}, {"sample_size": rank + 1}, {"skip": rank == 1}, {"sample_size": 0}][step]
        record = all_reduce_gradients(forms[form](), **part)
        assert record.call == step + 1
        assert record.divisor == wrapped.all_reduce(**part).divisor
        ours.append(_all_bits(_get(module)))
        theirs.append(_all_bits(_get(twin)))
    return ours, theirs


@pytest.mark.parametrize("form", ["module", "list", "generator"])
def test_function_equals_the_method_call_after_call(form: str) -> None:
    results = run_ranks(partial(_function, form), 2)

    assert results[0] == results[1]
    assert results[0][0] == results[0][1]
    assert results[0][0][-1] == [None] * 4


def _leftovers(form: str, rank: int) -> list[bool]:
    module = nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    wrapped: nn.Module = module
    if form == "wrapper":
        wrapped = LegacyDistributedDataParallel(module)
        wrapped.all_reduce()
    else:
        all_reduce_gradients(module if form == "module" else module.parameters())
    alive = [weakref.ref(thing) for thing in (wrapped, module, module.weight, module.weight.grad)]
    del module, wrapped
    gc.collect()
    return [ref() is not None for ref in alive]


@pytest.mark.parametrize("form", ["module", "parameters", "wrapper"])
def test_nothing_of_a_module_outlives_it(form: str) -> None:
    assert run_ranks(partial(_leftovers, form), 1) == [[False] * 4]


def _reduce_nothing(rank: int) -> list[int]:
    return [all_reduce_gradients([]).payload_bytes, all_reduce_gradients(nn.ReLU()).payload_bytes]


def test_function_with_nothing_to_reduce_does_nothing() -> None:
    assert run_ranks(_reduce_nothing, 2) == [[0, 0]] * 2


def _reduce_numbers(rank: int) -> int:
    numbers: list[Any] = [1.0]
    with pytest.raises(TypeError, match="expected a module or its parameters"):
        all_reduce_gradients(numbers)
    return all_reduce_gradients([nn.Parameter(torch.zeros(2))]).call


def test_function_refuses_what_is_not_a_tensor_and_the_group_stays_usable() -> None:
    assert run_ranks(_reduce_numbers, 2) == [1, 1]


def _sparse_of_another_dtype(rank: int) -> list[float]:
    embedding = nn.Embedding(3, 1, sparse=True, dtype=torch.bfloat16)
    model = LegacyDistributedDataParallel(embedding, checks=Checks(uneven="allow"))
    embedding.weight.grad_dtype = torch.float32
    if rank == 0:
        embedding.weight.grad = torch.tensor([[1.5], [0.0], [3.0]]).to_sparse(1)
    model.all_reduce()
    grad = embedding.weight.grad
    assert grad is not None
    assert grad.is_sparse
    return grad.to_dense().flatten().tolist()


def test_a_sparse_gradient_of_another_dtype_than_its_parameter_may_be_missing_on_a_rank() -> None:
    assert run_ranks(_sparse_of_another_dtype, 2) == [[0.75, 0.0, 1.5]] * 2
