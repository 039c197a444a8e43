"""check_replicas() on wrappers and groups, and in the middle of anything."""

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from legacy_ddp import LegacyDistributedDataParallel, PeerError, ReplicaDivergenceError
from legacy_ddp.debug import ReplicaReport, check_replicas
from tests.debug.test_check_replicas import net
from tests.helpers.cases import bits_of
from tests.helpers.ranks import run_ranks
from tests.helpers.replica_scenes import Observation, flip_lowest, holding, observations, observe
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.small_models import add_gradients

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
    seen = observations(f"{HERE}:WRAPPERS", 2, 0)[name]

    assert (seen.names, seen.phase, seen.ranks) == (names, phase, ranks), seen.text
    assert ("a count cannot tell" in seen.text) == bool(names and not ranks)
    # Where nothing differs, a missing gradient does not count.
    assert seen.compared["gradients"] == (seen.compared["parameters"] if names else 0)


def test_gradients_of_each_rank_are_left_out_with_a_note_if_they_were_asked_for() -> None:
    seen = observations(f"{HERE}:WRAPPERS", 2, 0)
    (note,) = seen["local gradients"].notes

    assert "gradients not compared" in note
    assert "ranks 0-1" in note
    assert seen["local gradients, not asked for"].notes == ()
    reduced = observations(f"{HERE}:WRAPPERS", 2)["edited"]
    assert (reduced.identical, reduced.compared["gradients"]) == (True, 1)


def _five_differ(deviates: bool, rank: int, **arguments: int) -> ReplicaReport:
    return check_replicas(holding(**{name: torch.ones(2) + deviates for name in "abcde"}), **arguments)


DETAILS = {count: partial(_five_differ, details=count) for count in (0, 1, 4, 9)} | {3: _five_differ}


@pytest.mark.parametrize("count", DETAILS)
def test_so_many_tensors_are_compared_by_element(count: int) -> None:
    seen = observations(f"{HERE}:DETAILS", 2, 1)[count]

    assert [element.thing for element in seen.elements] == [f"parameter {name!r}" for name in "abcde"[:count]]
    assert len(seen.names) == 5


def _in_a_group_of_two(rank: int) -> list[Observation]:
    group = dist.new_group([0, 2])
    if rank == 1:
        return []
    model = holding(it=torch.ones(2) + (rank == 2))
    wrapper = LegacyDistributedDataParallel(model, process_group=group, init_sync=False)
    return [observe(check_replicas(model, process_group=group)), observe(check_replicas(wrapper))]


def test_ranks_are_counted_in_the_group() -> None:
    first, outside, last = run_ranks(_in_a_group_of_two, 3, timeout_seconds=20)

    assert outside == []
    assert first == last
    assert ["rank 1 against rank 0" in seen.text for seen in first] == [True, True]


@on_ranks(2)
def _raising(rank: int) -> tuple[Any, ...]:
    model = holding(it=torch.ones(2) + rank)
    assert check_replicas(holding(it=torch.ones(2)), raises=True).identical
    with pytest.raises(ReplicaDivergenceError) as caught:
        check_replicas(model, raises=True)
    error = caught.value
    return str(error), str(error.report), error.ranks, error.call, error.phase, error.parameter


def test_a_difference_is_an_error_if_asked_for() -> None:
    first, second = _raising()

    assert first == second
    assert first[2:] == ((), 1, "unknown", "it")
    assert first[1] in first[0]


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
    identical.append(check_replicas(model).identical)
    with model.no_sync():
        identical.append(check_replicas(model).identical)
    with torch.inference_mode():
        identical.append(check_replicas(model).identical)
    with torch.autocast("cpu", torch.bfloat16):
        identical.append(check_replicas(model).identical)
    model.train()
    model.all_reduce()
    if rank == 1:
        flip_lowest(model.module[2].weight, (0, 1))
    with torch.inference_mode():
        identical.append(check_replicas(model).identical)
    return identical


@on_ranks(2)
def _inside_backward(rank: int) -> str:
    model = LegacyDistributedDataParallel(nn.Linear(1, 1))
    loss = model(torch.ones(1, 1)).sum()
    if rank == 1:
        loss.register_hook(lambda _: check_replicas(model) and None)
    with pytest.raises(PeerError) as caught:
        loss.backward() if rank == 1 else check_replicas(model)
    return str(caught.value)


def test_inside_backward_it_is_an_error_on_all_ranks() -> None:
    first, second = _inside_backward()

    assert first == second
    assert "inside backward" in first


@on_ranks(2)
def _all_frozen_on_one_rank(rank: int) -> tuple[bool, ...]:
    model = LegacyDistributedDataParallel(nn.Linear(2, 1))
    add_gradients(model, 1.0)
    if rank == 1:
        model.requires_grad_(False)
    return (check_replicas(model).identical, check_replicas(model, what=["parameters"]).identical)


def test_a_model_frozen_on_one_rank_alone_ends_on_all() -> None:
    first, second = _all_frozen_on_one_rank()

    assert first == second
    assert first[1]
