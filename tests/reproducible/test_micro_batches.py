"""Micro-batches in the order of a tree: their sums, their memory, and the splits over ranks."""

import gc
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp import Checks, LegacyDistributedDataParallel, _reproducible
from legacy_ddp._memory import segment
from legacy_ddp._memory.layout import Bucket
from legacy_ddp._memory.segment import SegmentPolicy
from legacy_ddp._ranks.tree_reduce import why_no_nodes
from legacy_ddp._reproducible import PartialSums
from tests.helpers import logged_warnings
from tests.helpers.rank_faults import counting
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.small_models import error_of
from tests.helpers.sums import Window, add_leaf, bring, take, tree_sum, wrap_reproducible
from tests.helpers.tiers import thorough

Model = LegacyDistributedDataParallel


def _model(**options: Any) -> Model:
    return wrap_reproducible([torch.ones(3)], **options)


def _left(model: Model) -> list[float]:
    return next(model.parameters()).grad.tolist()


@on_ranks(2)
def _joins_micro_batches(rank: int) -> tuple[list[str], list[int]]:
    model = _model(checks=Checks())
    warned, leaves = [], []
    for _ in range(2):
        model.zero_grad()
        for _ in range(3):
            bring(model.module, [torch.ones(3)])
        leaves.append(model.all_reduce(sample_size=1).rows[0].leaves)
        warned += logged_warnings.take()
    return warned, leaves


def test_backward_passes_without_blocks_of_their_own_are_warned_of_once() -> None:
    (warned, leaves), (silent, _) = _joins_micro_batches()

    assert leaves == [1, 1]
    assert silent == []
    assert len(warned) == 1
    assert "ranks 0-1 ran several backward passes in one micro-batch" in warned[0]
    assert "got 3 in 1" in warned[0]


@on_ranks(2, [[([2, 2], [1.0] * 3)] * 2] * 2)
def test_an_empty_block_is_a_micro_batch_and_no_uneven_work(rank: int) -> list[tuple[list[int], list[float]]]:
    """Three micro-batches on two ranks: rank 1 has one, and an empty block."""
    found = []
    for uneven in ("warn", "raise"):
        model = _model(checks=Checks(uneven=uneven))
        add_leaf(model, 1.0)
        if rank == 0:
            add_leaf(model, 1.0)
        else:
            with model.no_sync():
                pass
        rows = model.all_reduce(sample_size=2 - rank).rows
        found.append(([row.leaves for row in rows], _left(model)))
    return found


# Errors that leave the micro-batches as they were


@on_ranks(2, [("PeerError", [10.5] * 3)] * 2)
def test_micro_batches_outlive_an_error_also_on_a_rank_that_took_no_part(rank: int) -> tuple[str, list[float]]:
    """Rank 0 first says 0, rank 1 nothing; then both say what they hold."""
    model = _model()
    add_leaf(model, 10.0 + rank)
    kind, _ = error_of(model.all_reduce, sample_size=None if rank else 0)
    model.all_reduce(sample_size=1)
    return kind, _left(model)


@on_ranks(2)
def _void_beside_another_error(rank: int) -> list[str]:
    """Rank 1's block fails; it takes no part in a call that fails for another reason, and then wants to."""
    model = _model()
    with suppress(MemoryError), model.no_sync():
        bring(model.module, [torch.ones(3)])
        if rank:
            raise MemoryError("no room")
    said = [error_of(model.all_reduce, sample_size=0 if rank else None), error_of(model.all_reduce, sample_size=1)]
    return [item[1] if item else "" for item in said]


def test_a_failed_micro_batch_is_an_error_of_the_first_call_that_would_use_it() -> None:
    for first, second in _void_beside_another_error():
        assert "rank 0: ValueError: sample_size is missing" in first
        assert "rank 1: GradientError" in second
        assert "MemoryError: no room" in second


@on_ranks(2, [True] * 2)
def test_memory_is_taken_in_the_first_step_only(rank: int) -> bool:
    found = []  # the number of tensors that the sums have made until the end of each step
    model = _model()
    with counting("_new") as made:
        for _ in range(3):
            model.zero_grad()
            add_leaf(model, 1)
            add_leaf(model, 2)
            model.all_reduce(sample_size=1)
            found += made
    return found[0] == found[1] == found[2] > 0


# Partial sums of the leaves of a bucket: the bits of the tree in the dtype of the sums

CHUNK = _reproducible._CONVERTED_NUMEL


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 3])
def test_leaves_of_any_size_are_added_in_the_order_of_the_tree(numel: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(numel)
    leaves = [(1000 * torch.randn(numel, generator=generator)).to(dtype) for _ in range(7)]
    sums = PartialSums(Bucket(torch.device("cpu"), dtype, (), numel), SegmentPolicy())
    wide = torch.float32 if dtype == torch.float16 else dtype

    for count, leaf in enumerate(leaves, 1):
        expected = tree_sum([each.to(wide) for each in leaves[:count]])
        assert torch.equal(sums.total(leaf), expected)
        sums.add(leaf)
        assert torch.equal(sums.total(None), expected)


# Which hosts of ranks add their sums to nodes of the tree, compared with the nodes of a recursive tree

Ranks = tuple[int, ...]


def _nodes(ranks: Ranks) -> set[Ranks]:
    """The first part of a node is the largest power of two that is less than all."""
    if len(ranks) == 1:
        return {ranks}
    half = 2 ** ((len(ranks) - 1).bit_length() - 1)
    return {ranks} | _nodes(ranks[:half]) | _nodes(ranks[half:])


@st.composite
def _hosts(draw: st.DrawFn) -> list[Ranks]:
    """At least two hosts with equally many ranks: consecutive, or with two exchanged, or in any order."""
    count, each = draw(st.integers(2, 6)), draw(st.integers(1, 9))
    ranks = list(range(count * each))
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    elif draw(st.booleans()):
        first, second = draw(st.sampled_from(ranks)), draw(st.sampled_from(ranks))
        ranks[first], ranks[second] = ranks[second], ranks[first]
    return sorted(tuple(sorted(ranks[start : start + each])) for start in range(0, len(ranks), each))


@given(_hosts())
def test_hosts_are_nodes_where_the_tree_has_a_node_with_their_ranks(hosts: list[Ranks]) -> None:
    nodes = _nodes(tuple(range(sum(map(len, hosts)))))

    assert (why_no_nodes(hosts) == "") == all(ranks in nodes for ranks in hosts)


def _flat_tensors(rank: int, each: int) -> int:
    """How many tensors as large as all gradients there are after a step, without the parameter and without memory of
    the other rank."""
    size = 12345
    wrapped = wrap_reproducible([torch.ones(size)])
    for in_blocks in (False, True, False):
        wrapped.zero_grad()
        take(wrapped, Window([[torch.ones(size)]] * (2 * each), [1] * (2 * each), in_blocks), rank, 2)
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    found = {tensor.data_ptr() for tensor in tensors if tensor.numel() == size}
    found -= {address for address, mapping in segment._mappings.items() if mapping.descriptor < 0}
    return len(found - {parameter.data_ptr() for parameter in wrapped.parameters()})


@pytest.mark.parametrize("each, copies", [(1, 2), (4, 4), thorough(8, 5)])
def test_memory_is_two_gradients_more_than_the_logarithm(transport: str, each: int, copies: int) -> None:
    """In shared memory a single micro-batch needs no memory to receive."""
    if transport == "host" and each == 1:
        copies = 1
    assert run_ranks(partial(_flat_tensors, each=each), 2) == [copies] * 2
