"""Micro-batches in the order of a tree: their sums, their memory, and the splits over ranks."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, _reproducible
from legacy_ddp._memory import segment
from legacy_ddp._memory.layout import Bucket
from legacy_ddp._memory.segment import SegmentPolicy
from legacy_ddp._ranks.tree_reduce import why_no_nodes
from legacy_ddp._reproducible import PartialSums
from tests.helpers import logged_warnings
from tests.helpers.cases import get_gradients
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import run_cases
from tests.helpers.small_models import Said, error_of
from tests.helpers.small_sizes import move_gradients_from
from tests.helpers.sums import Window, bring, take, tree_sum, wrap_reproducible

# Micro-batches of a step: changes of gradients between them, and unrelated errors

Model = LegacyDistributedDataParallel


def _model() -> Model:
    """A smaller and a larger parameter; backward puts both gradients into their slots at once."""
    move_gradients_from(0)
    return wrap_reproducible([torch.ones(3), torch.ones(1)])


def _leaf(model: Model, value: float) -> None:
    with model.no_sync():
        _add(model, value)


def _add(model: Model, value: float) -> None:
    bring(model.module, [torch.full((3,), value), torch.full((1,), value)])


def _left(model: Model) -> list[Any]:
    return [None if grad is None else grad.tolist() for grad in get_gradients(model.module)]


def _filled(value: float) -> list[list[float]]:
    return [[value] * 3, [value]]


def _play(_: int, script: Callable[[Model], None]) -> list[Any]:
    model = _model()
    script(model)
    return _left(model)


# --- gradients that somebody keeps, scales or clears ------------------------------------------------------------------


def _written_to(model: Model) -> None:
    with model.no_sync():
        _add(model, 1)
        kept = [parameter.grad for parameter in model.parameters()]
    for grad in kept:
        grad.fill_(100.0)
    _leaf(model, 2)
    for grad in kept:
        grad.zero_()
    model.all_reduce(sample_size=1)


def _last_behind_a_block(model: Model) -> None:
    _leaf(model, 1)
    _add(model, 2)
    model.all_reduce(sample_size=1)


def _clipped(model: Model) -> None:
    _leaf(model, 1)
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(2)
    _leaf(model, 2)
    nn.utils.clip_grad_value_(model.parameters(), 1e9)
    model.all_reduce(sample_size=1)


def _clipped_in_the_end(model: Model) -> None:
    """It is too late for that, and no micro-batch more."""
    _leaf(model, 1)
    _leaf(model, 2)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert model.all_reduce(sample_size=1).rows[0].leaves == 2


def _cleared_inside(model: Model) -> None:
    """Only that block's gradients are meant: it takes them apart and begins anew."""
    _leaf(model, 1)
    with model.no_sync():
        _add(model, 50)
        model.zero_grad()
        _add(model, 2)
    model.all_reduce(sample_size=1)


def _cleared_after_an_empty_block(model: Model) -> None:
    with model.no_sync():
        pass
    model.zero_grad()
    _leaf(model, 3)
    assert model.all_reduce(sample_size=1).rows[0].micro_batches == 1


SCRIPTS = (
    _written_to,
    _last_behind_a_block,
    _clipped,
    _clipped_in_the_end,
    _cleared_inside,
    _cleared_after_an_empty_block,
)


def test_the_micro_batches_add_up_to_3() -> None:
    cases = {script.__name__: (script,) for script in SCRIPTS}

    assert run_cases(_play, 1, cases, fresh=True) == {name: [_filled(3.0)] for name in cases}


def _joined(rank: int) -> tuple[list[str], list[int]]:
    model = LegacyDistributedDataParallel(_model().module, reproducible=True)
    warned, leaves = [], []
    for _ in range(2):
        model.zero_grad()
        for _ in range(3):
            _add(model, 1.0 + rank)
        leaves.append(model.all_reduce(sample_size=1).rows[0].leaves)
        caught = logged_warnings.take_all()
        warned += [item.text for item in caught]
    return warned, leaves


def test_backward_passes_without_blocks_of_their_own_are_warned_of_once() -> None:
    (warned, leaves), (silent, _) = run_ranks(_joined, 2, fresh=True)

    assert leaves == [1, 1]
    assert silent == []
    assert len(warned) == 1
    assert "ranks 0-1 ran several backward passes in one micro-batch" in warned[0]
    assert "got 3 in 1" in warned[0]


def _padded(rank: int, uneven: str) -> tuple[list[int], list[Any]]:
    """Three micro-batches on two ranks: rank 1 has one, and an empty block."""
    model = wrap_reproducible([torch.ones(3), torch.ones(1)], checks=Checks(uneven=uneven))
    _leaf(model, 1.0)
    if rank == 0:
        _leaf(model, 1.0)
    else:
        with model.no_sync():
            pass
    rows = model.all_reduce(sample_size=2 - rank).rows
    return [row.leaves for row in rows], _left(model)


def test_an_empty_block_is_a_micro_batch_and_no_uneven_work() -> None:
    assert run_cases(_padded, 2, {"warn": ("warn",), "raise": ("raise",)}, fresh=True) == {
        uneven: [([2, 2], _filled(1.0))] * 2 for uneven in ("warn", "raise")
    }


# --- errors that leave the micro-batches as they were -----------------------------------------------------------------


def _try_again(rank: int) -> tuple[Said, list[Any]]:
    """Rank 0 first says 0, rank 1 nothing; then both say what they hold."""
    model = _model()
    _leaf(model, 10.0 + rank)
    said = error_of(model.all_reduce, sample_size=None if rank else 0)
    model.all_reduce(sample_size=1)
    return said, _left(model)


def test_micro_batches_outlive_an_error_also_on_a_rank_that_took_no_part() -> None:
    for said, left in run_ranks(_try_again, 2, fresh=True):
        assert said is not None
        assert said[0] == "PeerError"
        assert left == _filled(10.5)


def _void_beside_another_error(rank: int) -> list[str]:
    """Rank 1's block fails; it takes no part in a call that fails for another reason, and then wants to."""
    model = _model()
    error_of(_failing_block, model, rank)
    said = [error_of(model.all_reduce, sample_size=0 if rank else None), error_of(model.all_reduce, sample_size=1)]
    return [item[1] if item else "" for item in said]


def _failing_block(model: Model, rank: int) -> None:
    with model.no_sync():
        _add(model, 1)
        if rank:
            raise MemoryError("no room")


def test_a_failed_micro_batch_is_an_error_of_the_first_call_that_would_use_it() -> None:
    for first, second in run_ranks(_void_beside_another_error, 2, fresh=True):
        assert "rank 0: ValueError: sample_size is missing" in first
        assert "rank 1: GradientError" in second
        assert "MemoryError: no room" in second


# --- memory and other devices -----------------------------------------------------------------------------------------


def _tensors_made(rank: int) -> list[int]:
    """By the sums, step by step."""
    made: list[int] = []
    new = PartialSums._new

    def counted(sums: PartialSums) -> torch.Tensor:
        made.append(1)
        return new(sums)

    PartialSums._new = counted
    model = _model()
    found = []
    for _ in range(3):
        model.zero_grad()
        _leaf(model, 1)
        _leaf(model, 2)
        model.all_reduce(sample_size=1)
        found.append(len(made))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_memory_is_taken_in_the_first_step_only(world_size: int) -> None:
    for made in run_ranks(_tensors_made, world_size, fresh=True):
        assert made[0] == made[1] == made[2] > 0


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


@pytest.mark.parametrize("each, copies", [(1, 2), (2, 3), (4, 4), (8, 5)])
def test_memory_is_two_gradients_more_than_the_logarithm(transport: str, each: int, copies: int) -> None:
    """In shared memory a single micro-batch needs no memory to receive."""
    if transport == "host" and each == 1:
        copies = 1
    assert run_ranks(partial(_flat_tensors, each=each), 2) == [copies] * 2
