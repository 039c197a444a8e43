"""check_replicas() names differences in optimizers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp.debug import ReplicaReport, check_replicas
from tests.helpers.replica_scenes import elements_of, flip_lowest, holding, names_of, reports
from tests.helpers.small_models import add_gradients

HERE = "tests.debug.test_check_replicas_optimizers"
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.5, momentum=0.5),
    "AdamW": partial(torch.optim.AdamW, lr=0.5),
    "AdamW with a tensor for lr": partial(torch.optim.AdamW, lr=torch.tensor(0.5)),
}


def _stepped(model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    optimizer = make(model.parameters())
    for value in (1.0, 2.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
    return optimizer


def _changed(deviates: bool, rank: int, change: Callable[[Any, Any], object], name: str) -> ReplicaReport:
    """After two steps. ``change``: of the optimizer, and of the states of its two parameters."""
    model = holding(it=torch.ones(2, 3), other=torch.ones(2))
    optimizer = _stepped(model, _OPTIMIZERS[name])
    if deviates:
        change(optimizer, [*optimizer.state.values()])
    return check_replicas(model, optimizer)


def _change_rate(optimizer: torch.optim.Optimizer, _: object) -> None:
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 1.01


def _lost_state(deviates: bool, rank: int, name: str, steps: int) -> ReplicaReport:
    """A rank has resumed without ``optimizer.load_state_dict()``, and made so many equal steps since."""
    model = holding(a=torch.ones(2, 3), b=torch.ones(2))
    optimizer = _stepped(model, _OPTIMIZERS[name])
    if deviates:
        optimizer = _OPTIMIZERS[name](model.parameters())
    for _ in range(steps):
        optimizer.step()
    return check_replicas(model, optimizer)


def _nan_count(deviates: bool, rank: int) -> ReplicaReport:
    """NaNs with other bits, which have equal texts in Python."""
    model = holding(it=torch.ones(2, 3))
    optimizer = _stepped(model, _OPTIMIZERS["AdamW"])
    optimizer.state[model.it]["step"].fill_(float("nan"))
    if deviates:
        flip_lowest(optimizer.state[model.it]["step"], ())
    return check_replicas(model, optimizer)


def _lbfgs(deviates: bool, rank: int) -> ReplicaReport:
    model = holding(it=torch.ones(2, 3))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model.it - 3).pow(4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    if deviates:
        flip_lowest(optimizer.state[model.it]["d"], (4,))
    return check_replicas(model, optimizer)


def _built(
    deviates: bool, rank: int, build: Callable[[nn.Module, bool], Any], dtype: torch.dtype = torch.float32
) -> ReplicaReport:
    """Of the optimizers that ``build`` makes for two parameters."""
    model = holding(a=torch.ones(2, dtype=dtype), b=torch.ones(2, dtype=dtype))
    return check_replicas(model, build(model, deviates))


def _several(model: nn.Module, deviates: bool) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([model.a], lr=0.5), torch.optim.SGD([model.b], lr=0.25 if deviates else 0.5)]


def _second_group(model: nn.Module, deviates: bool) -> torch.optim.Optimizer:
    groups = [{"params": [model.a]}, {"params": [model.b], "weight_decay": 0.25 if deviates else 0.5}]
    return torch.optim.SGD(groups, lr=0.5)


def _master_weights(model: nn.Module, deviates: bool) -> torch.optim.Optimizer:
    master = model.a.detach().float()
    if deviates:
        flip_lowest(master, (1,))
    return torch.optim.SGD([master], lr=0.5)


def _in_another_group(model: nn.Module, deviates: bool) -> torch.optim.Optimizer:
    first, second = ([model.b], [model.a]) if deviates else ([model.a], [model.b])
    return torch.optim.SGD([{"params": first}, {"params": second}], lr=0.5)


def _group_with_a_label(model: nn.Module, deviates: bool) -> torch.optim.Optimizer:
    label = "head (new) 2" if deviates else "head (new) 1"  # looks like the text of a tensor
    return torch.optim.SGD([{"params": model.parameters(), "label": label}], lr=0.5)


_STATES = {"SGD": {"momentum_buffer": (1, 2)}, "AdamW": {"exp_avg": (1, 2), "exp_avg_sq": (1, 2), "step": ()}}
OPTIMIZERS = {
    **{
        f"{key} of {name}": partial(
            _changed, name=name, change=lambda _, states, key=key, place=place: flip_lowest(states[0][key], place)
        )
        for name, keys in _STATES.items()
        for key, place in keys.items()
    },
    **{f"lr of {name}": partial(_changed, name=name, change=_change_rate) for name in _OPTIMIZERS},
    "step of NaN": _nan_count,
    "LBFGS": _lbfgs,
    "beta": partial(
        _built,
        build=lambda model, deviates: torch.optim.Adam(model.parameters(), betas=(0.9, 0.98 if deviates else 0.99)),
    ),
    "several": partial(_built, build=_several),
    "second group": partial(_built, build=_second_group),
    "master weights": partial(_built, build=_master_weights, dtype=torch.bfloat16),
    "left out": partial(
        _built, build=lambda model, deviates: torch.optim.SGD([model.a] if deviates else [model.a, model.b], lr=0.5)
    ),
    "other groups": partial(_built, build=_in_another_group),
    "label": partial(_built, build=_group_with_a_label),
}
_NOT_LOST = ("why: parameters agree, the optimizer does not: the next step() will make the replicas differ",)
# Name: what happened, and what the text says of it.
LOST_STATE: dict[str, tuple[Callable[[bool, int], ReplicaReport], tuple[str, ...]]] = {
    "before a step": (
        partial(_lost_state, name="AdamW", steps=0),
        (
            "why: rank 1 has no optimizer state, unlike the others: perhaps resumed without "
            "optimizer.load_state_dict(); the next step() will make the replicas differ",
            "optimizer state: `step` is missing on rank 1, 2 on ranks 0, 2, in 2 of 2 parameters",
            "optimizer state: `exp_avg` is missing on rank 1, in 2 of 2 parameters",
        ),
    ),
    "momentum before a step": (
        partial(_lost_state, name="SGD", steps=0),
        (
            "why: rank 1 has no optimizer state, unlike the others: perhaps resumed without optimizer.load_state",
            "optimizer state: `momentum_buffer` is missing on rank 1, in 2 of 2 parameters",
        ),
    ),
    "after a step": (
        partial(_lost_state, name="AdamW", steps=1),
        (
            "why: `step` is 1 on rank 1, 3 on ranks 0, 2: rank 1 lost optimizer state (perhaps resumed without",
            "optimizer state: `step` is 1 on rank 1, 3 on ranks 0, 2, in 2 of 2 parameters",
            "optimizer state: `exp_avg` differs in 2 of 2 parameters: rank 1 against ranks 0, 2",
        ),
    ),
    "after many steps": (
        partial(_lost_state, name="AdamW", steps=3),
        ("why: `step` is 3 on rank 1, 5 on ranks 0, 2: rank 1 left out steps, or loaded older",),
    ),
    **{
        name: (partial(_changed, name="AdamW", change=change), _NOT_LOST)
        for name, change in {
            "a part of it": lambda _, states: [state.pop("exp_avg") for state in states],
            "of one parameter": lambda _, states: states[0].update(step=torch.tensor(1.0)),
            "a count as text": lambda _, states: [state.update(step="few") for state in states],
        }.items()
    },
}
LOST = {name: look for name, (look, _) in LOST_STATE.items()}
_NAMED = {
    "beta": ("1 in betas of parameter group 0",),
    "LBFGS": ("d of 'it'",),
    "several": ("optimizer 1: lr of parameter group 0",),
    "second group": ("weight_decay of parameter group 1",),
    "master weights": ("weights of 'parameter 0 of group 0'",),
    "left out": ("parameter group of 'b'",),
    "other groups": ("parameter group of 'a'", "parameter group of 'b'"),
    "label": ("label of parameter group 0",),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_differs_in_an_optimizer_is_named(name: str) -> None:
    seen = reports(f"{HERE}:OPTIMIZERS", 3, 1)[name]
    key = name.partition(" of ")[0]
    named = _NAMED.get(name) or (f"{key} of parameter group 0" if key == "lr" else f"{key} of 'it'",)

    assert names_of(seen) == named
    assert (seen.phase, seen.ranks) == ("step", (1,))
    assert reports(f"{HERE}:OPTIMIZERS", 2, 0, 1)[name].identical


def _in_detail(deviates: bool, rank: int, change: Callable[[Any, Any], object]) -> ReplicaReport:
    model = LegacyDistributedDataParallel(holding(it=torch.ones(2, 3, dtype=torch.bfloat16)), checks="detail")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        add_gradients(model, 1.0)
        model.all_reduce()
        optimizer.step()
    if deviates:
        change(model.module, optimizer)
    return check_replicas(model, optimizer)


def _flip_average(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    flip_lowest(optimizer.state[module.it]["exp_avg"], (1, 2))


def _flip_weight_and_average(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    flip_lowest(module.it, (0, 0))
    _flip_average(module, optimizer)


# Name: the change, what is named, the phase, and the evidence.
CHANGED: dict[str, tuple[Callable[[Any, Any], object], tuple[str, ...], str, str]] = {
    "average": (_flip_average, ("exp_avg of 'it'",), "step", "optimizer state"),
    "rate": (lambda _, optimizer: optimizer.param_groups[0].update(lr=0.25), ("lr of parameter group 0",), "step", ""),
    "weight and average": (_flip_weight_and_average, ("parameter 'it'", "exp_avg of 'it'"), "outside", "parameters"),
}
CHANGES = {name: partial(_in_detail, change=change) for name, (change, *_) in CHANGED.items()}


@pytest.mark.parametrize("name", CHANGED)
def test_of_two_ranks_the_one_whose_optimizer_state_changed_outside_of_a_step_is_named(name: str) -> None:
    _, names, phase, evidence = CHANGED[name]
    seen = reports(f"{HERE}:CHANGES", 2, 1)[name]

    assert (names_of(seen), seen.phase, seen.ranks) == (names, phase, (1,) if evidence else ()), str(seen)
    told = f"rank 1: {evidence} changed outside of a step"
    assert (told in " ".join(str(seen).split())) == bool(evidence), str(seen)
    if name == "average":
        assert [(element.rank, element.count, element.index) for element in elements_of(seen)] == [(1, 1, (1, 2))]
    assert reports(f"{HERE}:CHANGES", 2, 0, 1)[name].identical


@pytest.mark.parametrize("name", LOST)
def test_state_that_one_rank_lost_is_the_cause_and_not_cut_off(name: str) -> None:
    seen = reports(f"{HERE}:LOST", 3, 1)[name]

    assert seen.minority == (1,)
    assert all(words in " ".join(str(seen).split()) for words in LOST_STATE[name][1]), str(seen)
