"""No error from checks="detail" in any healthy training. Every rank trains on its own data."""

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from legacy_ddp import Checks, LegacyDistributedDataParallel, ReplicaDivergenceError
from legacy_ddp.debug import check_replicas
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import tanh_net
from tests.helpers.tiers import thorough

Model = partial(LegacyDistributedDataParallel, checks="detail")
LOCAL_STATISTICS = Checks("detail", local_buffers=("*.running_*",))  # for check_replicas(), which compares every buffer


def _backward(model: nn.Module) -> None:
    model(torch.randn(3, 4) + dist.get_rank()).square().mean().backward()


def _identical(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> bool:
    return check_replicas(model, optimizer, raises=True).identical


# A long training with all that makes ranks draw, round and skip


def _statistics_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


def _trains_long(rank: int, steps: int) -> tuple[int, int, float]:
    model = LegacyDistributedDataParallel(_statistics_net(), checks=LOCAL_STATISTICS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=20)
    torch.manual_seed(rank)
    skipped = looked = 0
    for step in range(steps):
        for last in [True] if step % 3 else [False, False, True]:
            data, target = torch.randn(6, 4), torch.randn(6, 1)
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(data).float() - target).square().mean()
            scale = float("inf") if step % 97 == 50 and rank == 1 else 1.0
            (scaler.scale(loss) * scale).backward()
            if not last and step % 2:
                with model.no_sync():
                    model.all_reduce()
        model.all_reduce(sample_size=4 + rank if step % 5 == 0 else None, skip=step % 7 == 0 and rank == 0)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step % 50 == 0:
            looked += _identical(model, optimizer)
    return skipped, looked, scaler.get_scale()


@pytest.mark.thorough
@pytest.mark.slow
def test_a_thousand_steps_with_everything_that_varies_are_silent() -> None:
    first, second = run_ranks(_trains_long, 2, 1000, timeout_seconds=240)

    assert first == second
    assert first[0] >= 5  # steps that the scaler skipped
    assert first[1] == 20


# Ways to train; each yields once per step it has made


def _one_of_two_wrappers_at_a_time(rank: int) -> Iterator[object]:
    generator, critic = Model(tanh_net()), Model(tanh_net())
    optimizers = [torch.optim.SGD(generator.parameters(), lr=0.1), torch.optim.Adam(critic.parameters(), lr=0.1)]
    for step in range(6):
        model, optimizer = [(critic, optimizers[1]), (generator, optimizers[0])][step % 3 == 2]
        optimizer.zero_grad()
        _backward(model)
        if model is critic:
            _backward(generator)  # gradients that nobody steps on
            generator.zero_grad()
        model.all_reduce()
        optimizer.step()
        yield _identical(model, optimizer)


def _two_optimizers_of_one_model(rank: int) -> Iterator[object]:
    model = Model(tanh_net())
    optimizers = [torch.optim.SGD(model.module[0].parameters(), lr=0.1), torch.optim.Adam(model.module[2].parameters())]
    for step in range(4):
        _backward(model)
        model.all_reduce()
        for optimizer in optimizers if (step + rank) % 2 else reversed(optimizers):
            optimizer.step()
            optimizer.zero_grad()
        yield _identical(model)


def _two_steps_a_call(rank: int) -> Iterator[object]:
    model = Model(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        _backward(model)
        model.all_reduce()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        yield _identical(model, optimizer)


def _step_every_other_call(rank: int) -> Iterator[object]:
    model = Model(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        _backward(model)
        model.all_reduce()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        yield True


def _lbfgs_with_a_closure(rank: int) -> Iterator[object]:
    model = Model(tanh_net())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.full((1, 4), 1.0 + rank)).square().mean()
        loss.backward()
        model.all_reduce()
        mean = loss.detach()
        dist.all_reduce(mean)
        return float(mean)

    for _ in range(3):
        optimizer.step(closure)
        yield _identical(model, optimizer)


def _zeroes_in_either_way(rank: int) -> Iterator[object]:
    model = Model(tanh_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for step in range(6):
        optimizer.zero_grad(set_to_none=bool(step // 2 % 2))
        _backward(model)
        model.all_reduce()
        optimizer.step()
        yield _identical(model, optimizer)


def _uneven_ranks(rank: int) -> Iterator[object]:
    model = Model(tanh_net(), checks=Checks(level="detail", uneven="allow"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for step in range(6):
        optimizer.zero_grad()
        for _ in range(rank if step % 2 else 1):
            _backward(model)
        model.all_reduce(sample_size=rank + step % 2 * 0 if step < 3 else 3 * rank)
        optimizer.step()
        yield _identical(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        if rank == 0:
            _backward(model)
        model.all_reduce(skip=rank == 1)
        optimizer.step()
        yield _identical(model, optimizer)
    model.all_reduce(skip=True)
    yield _identical(model, optimizer)


def _unused_layers(rank: int) -> Iterator[object]:
    model = Model(nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(4):
        model.module[rank if step % 2 else 0](torch.randn(1, 4)).sum().backward()
        model.all_reduce()
        optimizer.step()
        optimizer.zero_grad()
        yield _identical(model, optimizer)


def _averages_of_weights(rank: int) -> Iterator[object]:
    model = Model(tanh_net())
    average = AveragedModel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        _backward(model)
        model.all_reduce()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model.module)
        yield _identical(average)
    model.module.load_state_dict(average.module.state_dict())
    yield True
    _backward(model)
    yield model.all_reduce()


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


def _loads(model: LegacyDistributedDataParallel) -> None:
    model.module.load_state_dict({name: value / 2 for name, value in model.module.state_dict().items()})


def _freezes(model: LegacyDistributedDataParallel) -> None:
    model.module[0][0].weight.requires_grad_(False).grad = None  # or its optimizer would use what nobody reduced


def _adds_a_layer(model: LegacyDistributedDataParallel) -> None:
    layer = nn.Linear(1, 1)
    nn.init.ones_(layer.weight)
    nn.init.ones_(layer.bias)
    model.module.append(layer)


def _rounds(model: LegacyDistributedDataParallel) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())


_ACTS: dict[str, Callable[[LegacyDistributedDataParallel], object]] = {
    "loads": _loads,
    "freezes": _freezes,
    "adds a layer": _adds_a_layer,
    "rounds": _rounds,
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


def _pickled(model: LegacyDistributedDataParallel) -> LegacyDistributedDataParallel:
    return pickle.loads(pickle.dumps(model))


WAYS: dict[str, Callable[[int], Iterator[object]]] = {
    function.__name__.strip("_"): function
    for function in (
        _one_of_two_wrappers_at_a_time,
        _two_optimizers_of_one_model,
        _two_steps_a_call,
        _step_every_other_call,
        _lbfgs_with_a_closure,
        _zeroes_in_either_way,
        _uneven_ranks,
        _unused_layers,
        _averages_of_weights,
    )
}
WAYS |= {
    f"{name} before {moment}": partial(_interrupted, act=act, moment=moment)
    for name, act in _ACTS.items()
    for moment in ("forward", "call", "step", "end")
    if (name, moment) != ("adds a layer", "step")  # its gradients would be missing in this step alone: as "end"
}
WAYS |= {"deepcopy": partial(_copied, how=copy.deepcopy), "pickle": partial(_copied, how=_pickled)}


def _all_ways(rank: int) -> dict[str, list[bool] | str]:
    said: dict[str, list[bool] | str] = {}
    for name, way in WAYS.items():
        torch.manual_seed(100 + rank)
        try:
            said[name] = [bool(outcome) for outcome in way(rank)]
        except ReplicaDivergenceError as error:  # on all ranks: the next way can be tried
            said[name] = str(error)
    return said


_said: dict[int, list[dict[str, list[bool] | str]]] = {}


@pytest.mark.parametrize("world_size", [thorough(2), 3])
@pytest.mark.parametrize("name", WAYS)
def test_a_healthy_way_to_train_is_silent(name: str, world_size: int) -> None:
    if world_size not in _said:
        _said[world_size] = run_ranks(_all_ways, world_size, timeout_seconds=120)
    for said in _said[world_size]:
        assert isinstance(said[name], list), said[name]
        assert said[name]
        assert all(said[name])
