"""check_replicas() names differences in optimizers."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp.debug import ReplicaReport, check_replicas
from tests.helpers.replica_scenes import flip_lowest, holding, observations
from tests.helpers.small_models import add_gradients

HERE = "tests.debug.test_check_replicas_optimizers"
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.5, momentum=0.5),
    "AdamW": partial(torch.optim.AdamW, lr=0.5),
    "AdamW with a tensor for lr": partial(torch.optim.AdamW, lr=torch.tensor(0.5)),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.5),
}


def _stepped(model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    optimizer = make(model.parameters())
    for value in (1.0, 2.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
    return optimizer


def _changed_state(deviates: bool, rank: int, name: str, key: str) -> ReplicaReport:
    model = holding(it=torch.ones(2, 3))
    optimizer = _stepped(model, _OPTIMIZERS[name])
    if deviates:
        flip_lowest(optimizer.state[model.it][key], (1, 2) if optimizer.state[model.it][key].ndim else ())
    return check_replicas(model, optimizer)


def _changed_setting(deviates: bool, rank: int, name: str) -> ReplicaReport:
    model = holding(it=torch.ones(2, 3))
    optimizer = _stepped(model, _OPTIMIZERS[name])
    if deviates:
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 1.01
    return check_replicas(model, optimizer)


def _changed_beta(deviates: bool, rank: int) -> ReplicaReport:
    model = holding(it=torch.ones(2))
    return check_replicas(model, torch.optim.Adam(model.parameters(), betas=(0.9, 0.98 if deviates else 0.99)))


def _lost_state(deviates: bool, rank: int, name: str, steps: int) -> ReplicaReport:
    """A rank has resumed without ``optimizer.load_state_dict()``, and made so many equal steps since."""
    model = holding(a=torch.ones(2, 3), b=torch.ones(2))
    optimizer = _stepped(model, _OPTIMIZERS[name])
    if deviates:
        optimizer = _OPTIMIZERS[name](model.parameters())
    for _ in range(steps):
        optimizer.step()
    return check_replicas(model, optimizer)


def _other_entries(deviates: bool, rank: int, change: Callable[[list[dict[str, object]]], object]) -> ReplicaReport:
    """``change``: of the states of two parameters."""
    model = holding(a=torch.ones(2, 3), b=torch.ones(2))
    optimizer = _stepped(model, _OPTIMIZERS["AdamW"])
    if deviates:
        change([*optimizer.state.values()])
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


def _several(deviates: bool, rank: int) -> ReplicaReport:
    model = holding(a=torch.ones(2), b=torch.ones(2))
    optimizers = [torch.optim.SGD([model.a], lr=0.5), torch.optim.SGD([model.b], lr=0.25 if deviates else 0.5)]
    return check_replicas(model, optimizers)


def _second_group(deviates: bool, rank: int) -> ReplicaReport:
    model = holding(a=torch.ones(2), b=torch.ones(2))
    groups = [{"params": [model.a]}, {"params": [model.b], "weight_decay": 0.25 if deviates else 0.5}]
    return check_replicas(model, torch.optim.SGD(groups, lr=0.5))


def _master_weights(deviates: bool, rank: int) -> ReplicaReport:
    model = holding(it=torch.ones(2, dtype=torch.bfloat16))
    master = model.it.detach().float()
    if deviates:
        flip_lowest(master, (1,))
    return check_replicas(model, torch.optim.SGD([master], lr=0.5))


def _left_out(deviates: bool, rank: int) -> ReplicaReport:
    model = holding(a=torch.ones(2), b=torch.ones(2))
    return check_replicas(model, torch.optim.SGD([model.a] if deviates else [model.a, model.b], lr=0.5))


def _in_another_group(deviates: bool, rank: int) -> ReplicaReport:
    model = holding(a=torch.ones(2), b=torch.ones(2))
    first, second = ([model.b], [model.a]) if deviates else ([model.a], [model.b])
    return check_replicas(model, torch.optim.SGD([{"params": first}, {"params": second}], lr=0.5))


def _group_with_a_label(deviates: bool, rank: int) -> ReplicaReport:
    model = holding(it=torch.ones(2))
    label = "head (new) 2" if deviates else "head (new) 1"
    return check_replicas(model, torch.optim.SGD([{"params": [model.it], "label": label}], lr=0.5))


_STATES = {
    "SGD": ["momentum_buffer"],
    "AdamW": ["exp_avg", "exp_avg_sq", "step"],
    "Adagrad": ["sum", "step"],
}
OPTIMIZERS = {
    **{
        f"{key} of {name}": partial(_changed_state, name=name, key=key)
        for name, keys in _STATES.items()
        for key in keys
    },
    **{f"lr of {name}": partial(_changed_setting, name=name) for name in _OPTIMIZERS},
    "step of NaN": _nan_count,
    "beta": _changed_beta,
    "LBFGS": _lbfgs,
    "several": _several,
    "second group": _second_group,
    "master weights": _master_weights,
    "left out": _left_out,
    "other groups": _in_another_group,
}
LOST = {
    "before a step": partial(_lost_state, name="AdamW", steps=0),
    "momentum before a step": partial(_lost_state, name="SGD", steps=0),
    "after a step": partial(_lost_state, name="AdamW", steps=1),
    "after many steps": partial(_lost_state, name="AdamW", steps=3),
    "a part of it": partial(_other_entries, change=lambda states: [state.pop("exp_avg") for state in states]),
    "of one parameter": partial(_other_entries, change=lambda states: states[0].update(step=torch.tensor(1.0))),
    "a count as text": partial(_other_entries, change=lambda states: [state.update(step="few") for state in states]),
}
_NOT_LOST = ("why: parameters agree, the optimizer does not: the next step() will make the replicas differ",)
_LOST_WORDS = {
    "before a step": (
        "why: rank 1 has no optimizer state, unlike the others: perhaps resumed without optimizer.load_state_dict(); "
        "the next step() will make the replicas differ",
        "optimizer state: `step` is missing on rank 1, 2 on ranks 0, 2, in 2 of 2 parameters",
        "optimizer state: `exp_avg` is missing on rank 1, in 2 of 2 parameters",
    ),
    "momentum before a step": (
        "why: rank 1 has no optimizer state, unlike the others: perhaps resumed without optimizer.load_state_dict()",
        "optimizer state: `momentum_buffer` is missing on rank 1, in 2 of 2 parameters",
    ),
    "after a step": (
        "why: `step` is 1 on rank 1, 3 on ranks 0, 2: rank 1 lost optimizer state (perhaps resumed without",
        "optimizer state: `step` is 1 on rank 1, 3 on ranks 0, 2, in 2 of 2 parameters",
        "optimizer state: `exp_avg` differs in 2 of 2 parameters: rank 1 against ranks 0, 2",
    ),
    "after many steps": ("why: `step` is 3 on rank 1, 5 on ranks 0, 2: rank 1 left out steps, or loaded older",),
    "a part of it": _NOT_LOST,
    "of one parameter": _NOT_LOST,
    "a count as text": _NOT_LOST,
}
_NAMED = {
    "beta": ("1 in betas of parameter group 0",),
    "LBFGS": ("d of 'it'",),
    "several": ("optimizer 1: lr of parameter group 0",),
    "second group": ("weight_decay of parameter group 1",),
    "master weights": ("weights of 'parameter 0 of group 0'",),
    "left out": ("parameter group of 'b'",),
    "other groups": ("parameter group of 'a'", "parameter group of 'b'"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_differs_in_an_optimizer_is_named(name: str) -> None:
    seen = observations(f"{HERE}:OPTIMIZERS", 3, 1)[name]
    key = name.partition(" of ")[0]
    named = _NAMED.get(name) or (f"{key} of parameter group 0" if key == "lr" else f"{key} of 'it'",)

    assert seen.names == named
    assert (seen.phase, seen.ranks) == ("step", (1,))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_alike_are_identical(name: str) -> None:
    assert observations(f"{HERE}:OPTIMIZERS", 2, 0, 1)[name].identical


LABELS = {"label": _group_with_a_label}


def test_a_setting_whose_text_looks_like_a_tensor_is_reported_as_text() -> None:
    assert observations(f"{HERE}:LABELS", 2, 1)["label"].names == ("label of parameter group 0",)


# Evidence of a wrapper that follows the steps


def _in_detail(
    deviates: bool, rank: int, change: Callable[[nn.Module, torch.optim.Optimizer], object]
) -> ReplicaReport:
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


def _flip_count(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    flip_lowest(optimizer.state[module.it]["step"], ())


def _change_rate(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.25


def _flip_weight_and_average(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    flip_lowest(module.it, (0, 0))
    _flip_average(module, optimizer)


CHANGES = {
    "average": partial(_in_detail, change=_flip_average),
    "count": partial(_in_detail, change=_flip_count),
    "rate": partial(_in_detail, change=_change_rate),
    "weight and average": partial(_in_detail, change=_flip_weight_and_average),
}
_STATE_CHANGED = "rank 1: optimizer state changed outside of a step"


@pytest.mark.parametrize(
    "name, names, phase, words",
    [
        ("average", ("exp_avg of 'it'",), "step", (_STATE_CHANGED,)),
        ("count", ("step of 'it'",), "step", (_STATE_CHANGED,)),
        ("rate", ("lr of parameter group 0",), "step", ()),
        (
            "weight and average",
            ("parameter 'it'", "exp_avg of 'it'"),
            "outside",
            ("rank 1: parameters changed outside of a step",),
        ),
    ],
)
def test_of_two_ranks_the_one_whose_optimizer_state_changed_outside_of_a_step_is_named(
    name: str, names: tuple[str, ...], phase: str, words: tuple[str, ...]
) -> None:
    seen = observations(f"{HERE}:CHANGES", 2, 1)[name]

    assert (seen.names, seen.phase, seen.ranks) == (names, phase, (1,) if words else ()), seen.text
    assert all(word in " ".join(seen.text.split()) for word in words), seen.text
    if name == "average":
        assert [(element.rank, element.count, element.index) for element in seen.elements] == [(1, 1, (1, 2))]


@pytest.mark.parametrize("name", CHANGES)
def test_state_that_changed_alike_on_both_ranks_is_identical(name: str) -> None:
    assert observations(f"{HERE}:CHANGES", 2, 0, 1)[name].identical


@pytest.mark.parametrize("name", ["average", "count"])
def test_of_three_ranks_evidence_against_two_leaves_open_who_is_at_fault(name: str) -> None:
    seen = observations(f"{HERE}:CHANGES", 3, 0, 2)[name]

    assert (seen.ranks, seen.minority, seen.implicated) == ((), (1,), (0, 2)), seen.text


@pytest.mark.parametrize("name", LOST)
def test_state_that_one_rank_lost_is_the_cause_and_not_cut_off(name: str) -> None:
    seen = observations(f"{HERE}:LOST", 3, 1)[name]

    assert seen.minority == (1,)
    assert all(words in " ".join(seen.text.split()) for words in _LOST_WORDS[name]), seen.text
