"""Sparse gradients stay sparse where possible, and equal the dense gradients."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers.cases import (
    DTYPES,
    SKIP,
    Case,
    Grads,
    Part,
    all_bits,
    bits_of,
    both_ways,
    get_gradients,
    reduced_on_all,
    set_gradients,
    sparse_of,
    wrap_module,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.torch_versions import needs_grad_dtype

pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.unsimulated("it has no sparse tensors")]

ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


PARTS: dict[int, list[Part]] = {3: [{}, {}, {}], 8: [{"sample_size": n} for n in (1, 5, 2)], 2: [{}, SKIP, {}]}


def test_sparse_gradients_stay_sparse_and_equal_the_dense_result() -> None:
    sparse = [
        sparse_of([0, 3], ROWS * 24),
        sparse_of([3, 3], ROWS * 48),  # not coalesced
        sparse_of([], torch.zeros(0, 2)),
    ]
    like = torch.zeros(5, 2)
    cases = {  # by divisor
        (divisor, dtype): Case([like.to(dtype)], [[grad.to(dtype)] for grad in sparse], parts)
        for divisor, parts in PARTS.items()
        for dtype in DTYPES
    }

    for (divisor, dtype), (result,) in reduced_on_all(cases).items():
        total = torch.zeros(5, 2)
        total[0] = ROWS[0] * 24
        total[3] = ROWS[1] * 24 + (ROWS.sum(0) * 48 if SKIP not in PARTS[divisor] else 0)
        assert result.is_sparse
        assert result.is_coalesced()
        assert bits_of(result.to_dense()) == bits_of((total / divisor).to(dtype))


def test_sparse_gradients_become_dense_only_where_ranks_differ() -> None:
    full, row = torch.full((5, 2), 2.0), sparse_of([0, 3], ROWS)
    deep = row.to_dense().to_sparse(2)  # indices of both dimensions
    empty = sparse_of([], torch.zeros(0, 2))
    scalar = torch.tensor(3.0).to_sparse()
    grads: list[Grads] = [[full, row, None, empty, deep, scalar], [row, deep, row, empty, deep, scalar]]

    results = reduced_on_all(both_ways({"": Case([*[torch.zeros(5, 2)] * 5, torch.tensor(0.0)], grads)}))

    for result in results.values():
        assert [grad is not None and grad.is_sparse for grad in result[:5]] == [False, False, True, True, True]
        assert all_bits([grad.to_dense() for grad in result if grad is not None]) == all_bits(
            [
                1 + row.to_dense() / 2,
                row.to_dense(),
                row.to_dense() / 2,
                torch.zeros(5, 2),
                row.to_dense(),
                torch.tensor(3.0),
            ]
        )


@on_ranks(2, [[True] * 3] * 2)
def test_sparse_gradient_of_an_empty_parameter_is_reduced_call_after_call(rank: int) -> list[bool]:
    wrapped = wrap_module([torch.zeros(0, 2)])
    seen = []
    for _ in range(3):
        set_gradients(wrapped, [sparse_of([], torch.zeros(0, 2), 0)])
        wrapped.all_reduce(sample_size=2)
        seen += [grad is not None and grad.is_sparse for grad in get_gradients(wrapped)]
    return seen


def _of_another_dtype(rank: int) -> list[float]:
    embedding = nn.Embedding(3, 1, sparse=True, dtype=torch.bfloat16)
    model = LegacyDistributedDataParallel(embedding, checks=Checks(uneven="allow"))
    embedding.weight.grad_dtype = torch.float32
    if rank == 0:
        embedding.weight.grad = torch.tensor([[1.5], [0.0], [3.0]]).to_sparse(1)
    model.all_reduce()
    assert embedding.weight.grad.is_sparse
    return embedding.weight.grad.to_dense().flatten().tolist()


@needs_grad_dtype
def test_a_sparse_gradient_of_another_dtype_than_its_parameter_may_be_missing_on_a_rank() -> None:
    assert run_ranks(_of_another_dtype, 2) == [[0.75, 0.0, 1.5]] * 2


def _warn(*_: Any, **__: Any) -> None:
    raise UserWarning("as torch 2.11 does, also for check_invariants=False")


@on_ranks(2, [[[0.5, 0.5, 0.0], [0.5, 0.0, 0.0]]] * 2)
def test_no_call_warns_that_sparse_tensors_are_not_checked(rank: int) -> list[list[float]]:
    """The gradients of two embeddings; rank 1 has none of the second one."""
    net = nn.ModuleList([nn.Embedding(3, 1, sparse=True), nn.Embedding(3, 1, sparse=True)])
    wrapped = wrap_module(list(net.parameters()))
    for embedding in net[: 2 - rank]:
        embedding(torch.tensor([rank])).sum().backward()
    set_gradients(wrapped, [embedding.weight.grad for embedding in net])
    with patch.object(torch, "sparse_coo_tensor", _warn):
        wrapped.all_reduce()
    return [grad.to_dense().flatten().tolist() for grad in get_gradients(wrapped) if grad is not None]
