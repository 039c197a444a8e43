"""Uses that reproducible=True refuses: an error on every rank, and the next step is right."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDDPError, LegacyDistributedDataParallel
from tests.helpers import logged_warnings
from tests.helpers.cases import get_gradients
from tests.helpers.shared_jobs import on_ranks, once, run_cases
from tests.helpers.small_models import Said
from tests.helpers.sums import add_leaf, bring, wrap_reproducible

Model = LegacyDistributedDataParallel


class _Seen(NamedTuple):
    said: Said
    ranks: tuple[int, ...]
    after: list[Any]  # gradients of the next step


def _see(rank: int, name: str) -> _Seen:
    case = (CASES | SPARSE)[name]
    model = wrap_reproducible([torch.ones(2, 2)], **({} if case.checks is None else {"checks": case.checks}))
    parameter = next(model.parameters())
    said, ranks = None, ()
    try:
        case.act(model, rank)
    except (LegacyDDPError, ValueError) as error:
        said = type(error).__name__, str(error)
        ranks = error.ranks if isinstance(error, LegacyDDPError) else ()
    model.module._parameters.clear()
    model.module._parameters["0"] = parameter.requires_grad_()
    model.zero_grad()
    # Where parameters were exchanged, passes before it count on.
    add_leaf(model, 1.0 + rank)
    add_leaf(model, 3.0 + rank)
    model.all_reduce(sample_size=1)
    logged_warnings.take()  # of several backward passes in one micro-batch
    return _Seen(said, ranks, _left(model))


def _left(model: Model) -> list[Any]:
    return [None if grad is None else grad.tolist() for grad in get_gradients(model.module)]


def _leaves(counts: tuple[int, int], model: Model, rank: int, **arguments: Any) -> None:
    """So many micro-batches on each rank."""
    for _ in range(counts[rank]):
        add_leaf(model)
    model.all_reduce(**{"sample_size": 1, **arguments})


def _one_without_sample_size(model: Model, rank: int) -> None:
    add_leaf(model)
    model.all_reduce(sample_size=None if rank else 1)


def _exception_inside(model: Model, rank: int) -> None:
    add_leaf(model)
    with suppress(MemoryError), model.no_sync():
        bring(model.module, [torch.ones(2, 2)])
        if rank == 1:
            raise MemoryError("no room")
    model.all_reduce(sample_size=1)


def _outside_and_inside(model: Model, rank: int) -> None:
    if rank == 1:
        bring(model.module, [torch.ones(2, 2)])
        add_leaf(model)
    else:
        add_leaf(model)
        add_leaf(model)
    model.all_reduce(sample_size=1)


def _forgotten_zero_grad(model: Model, rank: int) -> None:
    for step in range(2):
        add_leaf(model)
        model.all_reduce(sample_size=1)
        if (step, rank) != (0, 1):
            model.zero_grad()


def _sparse(model: Model, rank: int, *, in_block: bool) -> None:
    with model.no_sync() if in_block else nullcontext():
        for parameter in model.parameters():
            parameter.grad = torch.ones(2, 2).to_sparse() if rank else torch.ones(2, 2)
    model.all_reduce(sample_size=1)


def _twice(model: Model, rank: int) -> None:
    add_leaf(model)
    model.all_reduce(sample_size=1)
    model.all_reduce(sample_size=1)


def _step_without_call(model: Model, rank: int) -> None:
    add_leaf(model)
    add_leaf(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def _change_in_between(change: Callable[[nn.Module], object], model: Model, rank: int) -> None:
    """A step whose first micro-batch is that of other parameters."""
    module = model.module
    module.register_parameter("other", nn.Parameter(torch.ones(1), requires_grad=False))
    with model.no_sync():
        module.get_parameter("0").sum().backward()
    change(module)
    with model.no_sync():
        module.get_parameter("0").grad = torch.ones(2, 2)
    model.all_reduce(sample_size=1)


def _replace(module: nn.Module) -> None:
    module.register_parameter("0", nn.Parameter(torch.ones(2, 2)))


def _replaced_after_the_blocks(model: Model, rank: int) -> None:
    add_leaf(model)
    _replace(model.module)
    model.all_reduce(sample_size=1)


def _nan(model: Model, rank: int) -> None:
    add_leaf(model, float("nan") if rank else 1.0)
    add_leaf(model)
    model.all_reduce(sample_size=1)


class _Case(NamedTuple):
    """``error``, ``words``: of the error on both ranks, and the ranks that it names."""

    act: Callable[[Model, int], None]
    error: str
    words: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    checks: Checks | None = None


def _of_rank_1(act: Callable[[Model, int], None], *words: str) -> _Case:
    return _Case(act, "PeerError", ("rank 1", *words), ranks=(1,))


def _changed(change: Callable[[nn.Module], object], words: str) -> _Case:
    words = f"the micro-batches of a step ({words}): gradients of the earlier micro-batches do not fit"
    return _Case(partial(_change_in_between, change), "GradientError", (words,))


CASES = {
    "numbers of micro-batches differ": _Case(
        partial(_leaves, (4, 3)), "DesyncError", ("rank 1 has 3", "rank 0 has 4", "1 x 8, 2 x 4, 4 x 2, 8 x 1")
    ),
    "no power of two": _Case(partial(_leaves, (3, 3)), "DesyncError", ("3 on each of 2 ranks", "1 x 6, 3 x 2, 6 x 1")),
    "no sample_size": _Case(
        partial(_leaves, (1, 1), sample_size=None), "ValueError", ("sample_size is missing", "reproducible=True")
    ),
    "skip": _Case(partial(_leaves, (1, 1), skip=True), "ValueError", ("skip is not usable", "sample_size=0")),
    "no sample_size on one rank": _of_rank_1(_one_without_sample_size, "sample_size is missing"),
    "an exception in a micro-batch": _of_rank_1(_exception_inside, "micro-batch 2", "MemoryError: no room"),
    "a micro-batch outside before a block": _of_rank_1(_outside_and_inside, "GradientError", "outside of any"),
    "a forgotten zero_grad()": _of_rank_1(_forgotten_zero_grad, "GradientError", "zero_grad() before every step"),
    "a second call": _Case(_twice, "GradientError", ("second time",)),
    "a step without the call": _Case(_step_without_call, "UnsynchronizedStepError", ("'0'",)),
    "a parameter thawed within a step": _changed(
        lambda module: module.get_parameter("other").requires_grad_(True),
        "parameter 'other' was frozen, and is trainable now",
    ),
    "a parameter frozen within a step": _changed(
        lambda module: module.get_parameter("0").requires_grad_(False), "parameter '0' was trainable, and is frozen now"
    ),
    "a parameter added within a step": _changed(
        lambda module: module.register_parameter("new", nn.Parameter(torch.ones(1))), "parameter 'new' is new"
    ),
    "a parameter replaced within a step": _changed(_replace, "parameter '0' is another tensor now"),
    "a parameter replaced after the blocks": _Case(
        _replaced_after_the_blocks, "GradientError", ("parameter '0' is another tensor now",)
    ),
    "a NaN in an early micro-batch": _Case(
        _nan,
        "NonFiniteGradientError",
        ("rank 1", "'0': 4 NaN of 4"),
        ranks=(1,),
        checks=Checks(uneven="allow", nonfinite="raise"),
    ),
}
SPARSE = {
    "in a block": _of_rank_1(partial(_sparse, in_block=True), "grad of '0' is sparse"),
    "after the blocks": _of_rank_1(partial(_sparse, in_block=False), "grad of '0' is sparse"),
}


@once
def _seen(*names: str) -> dict[str, list[_Seen]]:
    return run_cases(_see, 2, {name: (name,) for name in names})


def _check(seen: list[_Seen], case: _Case) -> None:
    for item in seen:
        assert item.said is not None
        assert item.said[0] == case.error
        assert all(word in item.said[1] for word in case.words), item.said[1]
        assert item.ranks == case.ranks
        assert item.after == [[[5.0] * 2] * 2]  # (1 + 3 + 2 + 4) / 2


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused_is_an_error_on_every_rank_and_the_next_step_is_right(name: str) -> None:
    _check(_seen(*CASES)[name], CASES[name])


@pytest.mark.unsimulated("it has no sparse tensors")
@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_gradient_is_refused_by_name(name: str) -> None:
    _check(_seen(*SPARSE)[name], SPARSE[name])


# Who takes no part


def _no_part(rank: int, taking: tuple[int, ...]) -> tuple[bool, tuple[int, ...], list[Any]]:
    model = wrap_reproducible([torch.ones(2, 2)])
    for _ in range(2 if rank in taking else 3):
        add_leaf(model, 1.0 if rank in taking else float("nan"))
    record = model.all_reduce(sample_size=2 if rank in taking else 0)
    found = _left(model)
    model.zero_grad()
    add_leaf(model)
    model.all_reduce(sample_size=1)
    return record.skipped, record.skipped_ranks, found + _left(model)


def test_a_rank_with_sample_size_0_counts_as_zeros() -> None:
    ones = [[1.0] * 2] * 2

    assert run_cases(_no_part, 2, {"first": ((0,),), "second": ((1,),), "none": ((),)}) == {
        "first": [(False, (1,), [ones, ones])] * 2,
        "second": [(False, (0,), [ones, ones])] * 2,
        "none": [(True, (0, 1), [None, ones])] * 2,
    }


# What is told of a step


@pytest.mark.cpu("norms are not read on a device")
@on_ranks(2, [[(6.0, 2, 4), (10.0, 2, 4)]] * 2)
def test_rows_describe_the_whole_step(rank: int) -> list[tuple[float | None, int, int | None]]:
    model = wrap_reproducible([torch.ones(2, 2)])
    for value in (1.0, 2.0):
        add_leaf(model, value + rank)
    record = model.all_reduce(sample_size=4)
    return [(row.local_norm, row.micro_batches, row.sample_size) for row in record.rows]
