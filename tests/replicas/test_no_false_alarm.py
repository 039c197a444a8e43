"""No error from checks="detail" in any healthy training. Every rank trains on its own data."""

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, ReplicaDivergenceError
from legacy_ddp.debug import check_replicas
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import once
from tests.helpers.small_models import tanh_net

pytestmark = pytest.mark.unsimulated("memory of its tensors does not outlive their objects")

Model = partial(LegacyDistributedDataParallel, checks="detail")
LOCAL_STATISTICS = Checks("detail", local_buffers=("*.running_*",))  # for check_replicas(), which compares every buffer


def _backward(model: nn.Module) -> None:
    model(torch.randn(3, 4) + dist.get_rank()).square().mean().backward()


def _identical(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> bool:
    return check_replicas(model, optimizer, raises=True).identical


# Ways to train; each yields once per step it has made


def _unused_layers(rank: int) -> Iterator[object]:
    model = Model(nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(4):
        model.module[rank if step % 2 else 0](torch.randn(1, 4)).sum().backward()
        model.all_reduce()
        optimizer.step()
        optimizer.zero_grad()
        yield _identical(model, optimizer)


def _train(model: LegacyDistributedDataParallel, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[object]:
    for _ in range(steps):
        _backward(model)
        model.all_reduce()
        optimizer.step()
        optimizer.zero_grad()
        yield _identical(model, optimizer)


def _interrupted(rank: int, act: Callable[[LegacyDistributedDataParallel], object], moment: str) -> Iterator[object]:
    model = Model(nn.Sequential(tanh_net(), nn.BatchNorm1d(1)), checks=LOCAL_STATISTICS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    yield from _train(model, optimizer, 2)
    for when in ("forward", "call", "step", "end"):
        if when == "call":
            _backward(model)
        if when == "step":
            model.all_reduce()
        if when == "end":
            optimizer.step()
            optimizer.zero_grad()
        if when == moment:
            act(model)
    yield from _train(model, optimizer, 2)


def _freezes(model: LegacyDistributedDataParallel) -> None:
    model.module[0][0].weight.requires_grad_(False).grad = None  # or its optimizer would use what nobody reduced


def _adds_a_layer(model: LegacyDistributedDataParallel) -> None:
    layer = nn.Linear(1, 1)
    nn.init.ones_(layer.weight)
    nn.init.ones_(layer.bias)
    model.module.append(layer)


_ACTS: dict[str, Callable[[LegacyDistributedDataParallel], object]] = {
    "freezes": _freezes,
    "adds a layer": _adds_a_layer,
    "broadcasts parameters": LegacyDistributedDataParallel.broadcast_parameters,
    "broadcasts buffers": LegacyDistributedDataParallel.broadcast_buffers,
    "looks": check_replicas,
}


def _copied(
    rank: int, how: Callable[[LegacyDistributedDataParallel], LegacyDistributedDataParallel]
) -> Iterator[object]:
    model = Model(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield from _train(model, optimizer, 2)
    _backward(model)
    model.all_reduce()
    twin = how(model)
    optimizer.step()
    yield from _train(twin, torch.optim.SGD(twin.parameters(), lr=0.2), 2)
    optimizer.zero_grad()
    yield from _train(model, optimizer, 2)


WAYS: dict[str, Callable[[int], Iterator[object]]] = {
    "unused layers": _unused_layers,
    **{
        f"{name} before {moment}": partial(_interrupted, act=act, moment=moment)
        for name, act in _ACTS.items()
        for moment in ("forward", "call", "step", "end")
        if (name, moment) != ("adds a layer", "step")  # its gradients would be missing in this step alone: as "end"
    },
    "deepcopy": partial(_copied, how=copy.deepcopy),
    "pickle": partial(_copied, how=lambda model: pickle.loads(pickle.dumps(model))),
}


def _all_ways(rank: int) -> dict[str, list[bool] | str]:
    said: dict[str, list[bool] | str] = {}
    for name, way in WAYS.items():
        torch.manual_seed(100 + rank)
        try:
            said[name] = [bool(outcome) for outcome in way(rank)]
        except ReplicaDivergenceError as error:  # on all ranks: the next way can be tried
            said[name] = str(error)
    return said


@once
def _said() -> list[dict[str, list[bool] | str]]:
    return run_ranks(_all_ways, 3, timeout_seconds=120)


@pytest.mark.parametrize("name", WAYS)
def test_a_healthy_way_to_train_is_silent(name: str) -> None:
    for said in _said():
        assert isinstance(said[name], list), said[name]
        assert said[name]
        assert all(said[name])
