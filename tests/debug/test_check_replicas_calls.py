"""check_replicas() on wrappers and groups, in the middle of anything, and with wrong arguments."""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from legacy_ddp import LegacyDistributedDataParallel, PeerError, ReplicaDivergenceError
from legacy_ddp.debug import ReplicaReport, check_replicas, cross_check
from tests.debug.test_check_replicas import net
from tests.helpers.cases import bits_of
from tests.helpers.ranks import run_ranks
from tests.helpers.replica_scenes import elements_of, flip_lowest, holding, names_of, reports
from tests.helpers.shared_jobs import on_ranks, once, run_cases
from tests.helpers.small_models import Said, add_gradients, error_of, wrap

HERE = "tests.debug.test_check_replicas_calls"


def _wrapped(deviates: bool, rank: int, **arguments: Any) -> ReplicaReport:
    model = LegacyDistributedDataParallel(net(), **arguments)
    if deviates:
        flip_lowest(model.module[2].weight, (0, 1))
        model.module[1].running_var[1] = 7.0
    return check_replicas(model)


def _with_gradients(deviates: bool, rank: int, calls: bool, **arguments: Any) -> ReplicaReport:
    model = LegacyDistributedDataParallel(nn.Linear(2, 1, bias=False))
    add_gradients(model, 1.0 + rank)
    if calls:
        model.all_reduce()
        if deviates:
            flip_lowest(model.module.weight.grad, (0, 1))
    return check_replicas(model, **arguments)


def _under_torch_ddp(deviates: bool, rank: int) -> ReplicaReport:
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    if deviates:
        flip_lowest(model.module.weight, (0, 1))
    return check_replicas(model)


def _after_a_step(deviates: bool, rank: int) -> ReplicaReport:
    model = LegacyDistributedDataParallel(nn.Linear(2, 1, bias=False), checks="detail")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    add_gradients(model, 1.0)
    model.all_reduce()
    optimizer.step()
    if deviates:
        flip_lowest(model.module.weight, (0, 1))
    return check_replicas(model, optimizer)


# Name: the look, what is named, the phase, and the ranks.
WRAPPED: dict[str, tuple[Callable[..., ReplicaReport], tuple[str, ...], str, tuple[int, ...]]] = {
    "local gradients": (partial(_with_gradients, calls=False), (), "", ()),
    "local gradients, not asked for": (partial(_with_gradients, calls=False, what=["parameters"]), (), "", ()),
    "edited": (partial(_with_gradients, calls=True), ("gradient of 'weight'",), "gradients", ()),
    "plain": (_wrapped, ("parameter '2.weight'", "buffer '1.running_var'"), "unknown", ()),
    "ignoring": (partial(_wrapped, ignore=["2.weight", "1.running_var"]), (), "", ()),
    "torch DDP": (_under_torch_ddp, ("parameter 'module.weight'",), "unknown", ()),
    "detail": (_after_a_step, ("parameter 'weight'",), "outside", (0,)),  # the wrapper knows what the step left
}
WRAPPERS = {name: look for name, (look, *_) in WRAPPED.items()}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_replicas_are_compared_by_the_names_in_the_module(name: str) -> None:
    _, names, phase, ranks = WRAPPED[name]
    seen = reports(f"{HERE}:WRAPPERS", 2, 0)[name]

    assert (names_of(seen), seen.phase, seen.ranks) == (names, phase, ranks), str(seen)
    assert ("a count cannot tell" in str(seen)) == bool(names and not ranks)
    # Where nothing differs, a missing gradient does not count.
    assert seen.compared["gradients"] == (seen.compared["parameters"] if names else 0)


def test_gradients_of_each_rank_are_left_out_with_a_note_if_they_were_asked_for() -> None:
    seen = reports(f"{HERE}:WRAPPERS", 2, 0)
    (note,) = seen["local gradients"].notes

    assert "gradients not compared" in note
    assert "ranks 0-1" in note
    assert seen["local gradients, not asked for"].notes == ()
    reduced = reports(f"{HERE}:WRAPPERS", 2)["edited"]
    assert (reduced.identical, reduced.compared["gradients"]) == (True, 1)


def _five_differ(deviates: bool, rank: int, **arguments: int) -> ReplicaReport:
    return check_replicas(holding(**{name: torch.ones(2) + deviates for name in "abcde"}), **arguments)


DETAILS = {count: partial(_five_differ, details=count) for count in (0, 1, 4, 9)} | {3: _five_differ}


@pytest.mark.parametrize("count", DETAILS)
def test_so_many_tensors_are_compared_by_element(count: int) -> None:
    seen = reports(f"{HERE}:DETAILS", 2, 1)[count]

    assert [element.thing for element in elements_of(seen)] == [f"parameter {name!r}" for name in "abcde"[:count]]
    assert len(names_of(seen)) == 5


def _in_a_group_of_two(rank: int) -> list[ReplicaReport]:
    group = dist.new_group([0, 2])
    if rank == 1:
        return []
    model = holding(it=torch.ones(2) + (rank == 2))
    wrapper = LegacyDistributedDataParallel(model, process_group=group, init_sync=False)
    return [check_replicas(model, process_group=group), check_replicas(wrapper)]


def test_ranks_are_counted_in_the_group() -> None:
    first, outside, last = run_ranks(_in_a_group_of_two, 3, timeout_seconds=20)

    assert outside == []
    assert first == last
    assert ["rank 1 against rank 0" in str(seen) for seen in first] == [True, True]


@on_ranks(2, gives=[((), 1, "unknown", "it")] * 2)
def test_a_difference_is_an_error_if_asked_for(rank: int) -> tuple[Any, ...]:
    model = holding(it=torch.ones(2) + rank)
    assert check_replicas(holding(it=torch.ones(2)), raises=True).identical
    with pytest.raises(ReplicaDivergenceError) as caught:
        check_replicas(model, raises=True)
    error = caught.value
    assert str(error.report) in str(error)
    return error.ranks, error.call, error.phase, error.parameter


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
    import numpy as np

    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    states = [bits_of(value) for state in optimizer.state.values() for value in state.values()]
    versions = [parameter._version for parameter in model.parameters()]
    settings = copy.deepcopy(optimizer.state_dict()["param_groups"])
    generators = [bits_of(torch.get_rng_state()), random.getstate(), np.random.get_state()[1].tobytes()]
    return [list(map(bits_of, tensors)), states, versions, settings, generators, model.training]


def _touches(rank: int, differs: bool) -> tuple[int, list[bool]]:
    model = LegacyDistributedDataParallel(net(), checks="detail")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        add_gradients(model, 1.0)
        model.all_reduce()
        optimizer.step()
    if differs and rank == 1:
        flip_lowest(model.module[2].weight, (0, 1))
        model.module[1].running_mean[0] = 9.0
    pointers = [parameter.grad.data_ptr() for parameter in model.parameters()]
    before = _everything(model, optimizer)
    report = check_replicas(model, optimizer, details=20)
    assert pointers == [parameter.grad.data_ptr() for parameter in model.parameters()]
    return len(report.differences), [was == now for was, now in zip(before, _everything(model, optimizer), strict=True)]


@on_ranks(2, gives=[[(0, [True] * 6), (2, [True] * 6)]] * 2)
def test_it_changes_no_bit(rank: int) -> list[Any]:
    return [_touches(rank, differs) for differs in (False, True)]


@on_ranks(2, gives=[[True, True, True, True, False]] * 2)
def test_it_can_be_called_anywhere(rank: int) -> list[bool]:
    model = LegacyDistributedDataParallel(net(), checks="detail")
    identical = []
    model.eval()
    for mode in (nullcontext(), model.no_sync(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            identical.append(check_replicas(model).identical)
    model.train()
    model.all_reduce()
    if rank == 1:
        flip_lowest(model.module[2].weight, (0, 1))
    with torch.inference_mode():
        identical.append(check_replicas(model).identical)
    return identical


@on_ranks(2, gives=[None] * 2)
def test_inside_backward_it_is_an_error_on_all_ranks(rank: int) -> None:
    model = LegacyDistributedDataParallel(nn.Linear(1, 1))
    loss = model(torch.ones(1, 1)).sum()
    if rank == 1:
        loss.register_hook(lambda _: check_replicas(model) and None)
    with pytest.raises(PeerError, match="inside backward"):
        loss.backward() if rank == 1 else check_replicas(model)


@on_ranks(2, gives=[(True, True)] * 2)
def test_a_model_frozen_on_one_rank_alone_ends_on_all(rank: int) -> tuple[bool, ...]:
    model = LegacyDistributedDataParallel(nn.Linear(2, 1))
    add_gradients(model, 1.0)
    if rank == 1:
        model.requires_grad_(False)
    return check_replicas(model).identical, check_replicas(model, what=["parameters"]).identical


# Name: an argument, and the error of a rank that gives it; "" if it is wrong only beside the other rank's.
ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "what in one string": ({"what": "parameters"}, "TypeError"),
    "what unknown": ({"what": ["weights"]}, "ValueError"),
    "what of numbers": ({"what": [1]}, "TypeError"),
    "what no iterable": ({"what": 1}, "TypeError"),
    "what empty": ({"what": ()}, "ValueError"),
    "details negative": ({"details": -1}, "ValueError"),
    "details a bool": ({"details": True}, "ValueError"),
    "details a float": ({"details": 1.5}, "ValueError"),
    "raises a number": ({"raises": 1}, "TypeError"),
    "local buffers in one string": ({"local_buffers": "1.running_mean"}, "TypeError"),
    "local buffers unknown": ({"local_buffers": ["1.nothing"]}, "ValueError"),
    "local buffers a number": ({"local_buffers": 3}, "TypeError"),
    "optimizers without any": ({"what": ["optimizer"]}, "ValueError"),
    "optimizer a string": ({"optimizer": "SGD"}, "TypeError"),
    "optimizer a class": ({"optimizer": [torch.optim.SGD]}, "TypeError"),
    "model a number": ({"model": 1}, "TypeError"),
    "model several tensors": ({"model": [torch.ones(2)]}, "TypeError"),
    "other what": ({"what": ["buffers"]}, ""),
    "other details": ({"details": 7}, ""),
    "other raises": ({"raises": True}, ""),
}


def _call_with(rank: int, arguments: Any, wrong: tuple[int, ...]) -> tuple[Said, bool]:
    """The error of a call with ``arguments`` on the ranks in ``wrong``, and whether the next call works."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    said = error_of(check_replicas, **({"model": model} | (arguments if rank in wrong else {})))
    return said, check_replicas(model).identical


@once
def _found() -> dict[Any, list[tuple[Said, bool]]]:
    wrong_on = ((1,), (0, 1))
    return run_cases(_call_with, 2, {(name, on): (ARGUMENTS[name][0], on) for name in ARGUMENTS for on in wrong_on})


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_wrong_argument_is_the_rank_s_own_error_or_one_of_all_and_the_next_call_works(name: str) -> None:
    kind = ARGUMENTS[name][1]
    first, second = _found()[name, (1,)]

    assert first == second
    assert first[0] is not None
    assert (first[0][0], first[1]) == ("PeerError" if kind else "LayoutError", True)
    assert (f"rank 1: {kind}: " if kind else name.removeprefix("other ")) in first[0][1]
    for said, is_usable in _found()[name, (0, 1)]:
        assert (said and said[0], is_usable) == (kind or None, True), said


@pytest.mark.usefixtures("alone")
def test_a_compiled_wrapper_is_the_wrapper_to_the_tools() -> None:
    model = wrap()
    compiled = torch.compile(model, backend="eager")

    assert check_replicas(compiled).identical
    assert cross_check(compiled, lambda model, batch: model(batch).sum(), torch.ones(3, 2)).agrees
