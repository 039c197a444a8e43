"""Gradients after all_reduce() equal the gradients of one process with the data of all ranks."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from legacy_ddp import AgreedError, GradientError
from tests.helpers.cases import (
    DTYPES,
    SKIP,
    Case,
    Grads,
    Part,
    all_bits,
    bits_of,
    check_case,
    get_gradients,
    sparse_of,
    vectors,
    wrap_module,
)
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import error_of
from tests.helpers.tiers import thorough
from tests.helpers.torch_versions import needs_grad_dtype

pytestmark = pytest.mark.usefixtures("transport")

# What a call means


@pytest.mark.parametrize("world_size", [1, 3, thorough(4)])
def test_plain_call_leaves_the_mean_on_every_rank(world_size: int) -> None:
    grads = vectors(*([6.0 * (rank + 1), -2.0 * (rank + 1)] for rank in range(world_size)))

    # Small integers whose sum world_size divides: exact in every dtype.
    cases = {dtype: Case([torch.zeros(2, dtype=dtype)], [[grad.to(dtype)] for (grad,) in grads]) for dtype in DTYPES}
    check_case(cases, {dtype: [torch.tensor([3.0, -1.0], dtype=dtype) * (world_size + 1)] for dtype in DTYPES})


def test_only_ranks_that_take_part_count() -> None:
    grads = vectors([6.0, 60.0], [12.0, 120.0], [18.0, 180.0])
    table: list[tuple[list[Part], float | None]] = [
        ([{"sample_size": 1}, {"sample_size": 2}, {"sample_size": 3}], (6 + 12 + 18) / 6),
        ([{"sample_size": 4}, {"sample_size": 0}, {"sample_size": 2}], (6 + 18) / 6),
        ([{"sample_size": 0}, {"sample_size": 0}, {"sample_size": 9}], 18 / 9),
        ([{}, SKIP, {}], (6 + 18) / 2),
        ([SKIP, SKIP, {}], 18.0),
        ([{"sample_size": 2}, {"sample_size": -1, "skip": True}, {"sample_size": 1}], (6 + 18) / 3),
        ([SKIP, SKIP, SKIP], None),
        ([{"sample_size": 0}] * 3, None),
        ([SKIP, {"sample_size": 0}, SKIP], None),
    ]

    check_case(
        {str(parts): Case([torch.zeros(2)], grads, parts) for parts, _ in table},
        {str(parts): [value and torch.tensor([value, 10 * value])] for parts, value in table},
    )


def test_a_sample_size_is_anything_that_counts_as_an_int() -> None:
    sizes = [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3), torch.tensor([3], dtype=torch.uint8)]
    sizes += [3.0, np.float32(3), np.float64(3), np.array(3.0)]
    sizes += [torch.tensor(3.0), torch.tensor([[3.0]], requires_grad=True), torch.tensor(3.0, dtype=torch.bfloat16)]
    grads = vectors([6.0, 60.0], [12.0, 120.0])

    check_case(
        {repr(size): Case([torch.zeros(2)], grads, [{"sample_size": size}, {"sample_size": 1}]) for size in sizes},
        {repr(size): [torch.tensor([18.0, 180.0]) / 4] for size in sizes},
    )


_TYPE = "sample_size is of the wrong type: got "
_NUMBER = ", expected a whole number (of Python or NumPy, or a tensor of one element), or None"
_WHOLE = "multiply every gradient by record.divisor / record.metrics['weight'] after the call"
_REFUSED: list[tuple[Any, str, tuple[str, ...]]] = [  # the sample_size, its error, and the words of the text
    (True, "TypeError", (f"{_TYPE}bool", _NUMBER)),
    (torch.tensor(True), "TypeError", (f"{_TYPE}Tensor of torch.bool, shape ()", _NUMBER)),
    (torch.tensor([1.0, 2.0]), "TypeError", (f"{_TYPE}Tensor of torch.float32, shape (2,)", _NUMBER)),
    (torch.tensor(3 + 0j), "TypeError", (f"{_TYPE}Tensor of torch.complex64, shape ()", _NUMBER)),
    (np.array([3.0]), "TypeError", (f"{_TYPE}ndarray of float64, shape (1,)", _NUMBER)),
    (np.array([1, 2]), "TypeError", (f"{_TYPE}ndarray of int64, shape (2,)", _NUMBER)),
    (np.array(True), "TypeError", (f"{_TYPE}ndarray of bool, shape ()", _NUMBER)),
    ("3", "TypeError", (f"{_TYPE}str", _NUMBER)),
    *(
        (value, "ValueError", (f"sample_size is out of range: got {text}, expected 0 to 2**62 - 1",))
        for value, text in (
            *((-1, "-1"), (2**62, f"{2**62}"), (np.uint64(2**63), f"{2**63}"), (-2.0, "-2")),
            *((torch.tensor(math.nan), "nan"), (math.inf, "inf"), (np.float32("-inf"), "-inf")),
        )
    ),
    *(
        (value, "ValueError", (f"sample_size is not a whole number: got {text}, expected", _WHOLE))
        for value, text in ((3.5, "3.5"), (torch.tensor(0.25), "0.25"), (np.float64(1e-30), "1e-30"))
    ),
    # Counted in fp32, 2**24 + 1 items are 2**24.
    *(
        (value, "ValueError", (f" as {dtype}, which holds every whole number only below ",))
        for value, dtype in (
            (torch.tensor(2.0**24 + 1), "float32"),
            (torch.tensor(300.0, dtype=torch.bfloat16), "bfloat16"),
            (2.0**53, "float64"),
        )
    ),
]


@on_ranks(2, [None] * 2)
def test_a_sample_size_that_counts_nothing_is_refused_with_its_type_and_its_limits_are_true(rank: int) -> None:
    model = wrap_module([torch.zeros(2)])
    for size, kind, words in _REFUSED:
        found, text = error_of(model.all_reduce, size)
        assert found == kind
        assert all(word in text for word in words), text


@pytest.mark.unsimulated("it has no sparse tensors")
def test_gradients_of_a_rank_that_takes_no_part_do_not_matter() -> None:
    bad, unusable = torch.tensor([math.nan, math.inf]), torch.ones(2, requires_grad=True)
    useless: Grads = [bad, sparse_of([1], torch.ones(1), 2), unusable, None, torch.ones(2)]
    useful: Grads = [*[torch.full((2,), 4.0)] * 4, None]
    parts: dict[str, list[Part]] = {"skip": [SKIP, {}], "0": [{"sample_size": 0}, {"sample_size": 2}]}

    check_case(
        {label: Case([torch.zeros(2)] * 5, [useless, useful], part) for label, part in parts.items()},
        {"skip": useful, "0": [*[torch.full((2,), 2.0)] * 4, None]},
    )


# Gradients that cannot be reduced


def _other_dtype(rank: int, grad_dtypes: Sequence[torch.dtype | None]) -> tuple[str, Grads, Grads]:
    wrapped = wrap_module([torch.zeros(2, dtype=torch.bfloat16)])
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
    result = get_gradients(wrapped)
    parameter.grad, parameter.grad_dtype = None, torch.bfloat16
    parameter.grad = torch.ones(2, dtype=torch.bfloat16)
    wrapped.all_reduce()
    return told, result, get_gradients(wrapped)


_OTHER_DTYPES: dict[str, Sequence[torch.dtype | None]] = {  # by what is told
    "": (torch.float32, torch.float32),  # asked for on every rank: reduced in that dtype
    "LayoutError": (torch.float32, torch.bfloat16),
    "has dtype torch.float32, expected torch.bfloat16": (None, None),
    "PeerError": (torch.bfloat16, None),
}


@needs_grad_dtype
def test_gradient_of_another_dtype_than_its_parameter_is_never_rounded() -> None:
    found = run_cases(_other_dtype, 2, {told: (grad_dtypes,) for told, grad_dtypes in _OTHER_DTYPES.items()})

    for told, results in found.items():
        for grad_dtype, (what, grads, later) in zip(_OTHER_DTYPES[told], results, strict=True):
            assert told in what
            assert bool(told) == bool(what)
            assert all_bits(grads) == [bits_of(torch.tensor([1.001, 1e-3], dtype=grad_dtype or torch.float32))]
            assert all_bits(later) == [bits_of(torch.ones(2, dtype=torch.bfloat16))]


# Settings that must not change a result


@pytest.mark.unsimulated("it has no sparse tensors")
def test_one_rank_leaves_a_plain_mean_bitwise_unchanged_and_divides_by_sample_size() -> None:
    cases, expected = {}, {}
    for dtype in DTYPES:
        real = torch.tensor([1.001, -0.0, math.inf, 6e-8, 6e4, math.nan]).to(dtype)
        # Sparse without -0.0: torch's coalesce() on CUDA begins each sum with 0.0.
        grads: Grads = [real, sparse_of([0, 4], real[::2][:2])]
        like = [torch.zeros(6, dtype=dtype), torch.zeros(5, dtype=dtype)]
        cases[dtype, "plain"] = Case(like, [grads])
        cases[dtype, "reduce_dtype"] = Case(like, [grads], options={"reduce_dtype": torch.bfloat16})
        expected[dtype, "plain"] = expected[dtype, "reduce_dtype"] = grads
        three, eight = (
            [torch.full((2,), value).to(dtype), sparse_of([2], torch.full((1,), value).to(dtype))]
            for value in (24.0, 8.0)
        )
        cases[dtype, "sample_size"] = Case([torch.zeros(2, dtype=dtype), like[1]], [three], [{"sample_size": 3}])
        expected[dtype, "sample_size"] = eight

    check_case(cases, expected)
