"""Does check_replicas() name what differs in an optimizer?"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from legacy_ddp.debug import ReplicaReport, check_replicas
from tests.looks import flip_lowest, holding, looked

HERE = "tests.test_check_replicas_optimizers"
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
    "beta": _changed_beta,
    "LBFGS": _lbfgs,
    "several": _several,
    "second group": _second_group,
    "master weights": _master_weights,
}
_NAMED = {
    "beta": "1 in betas of parameter group 0",
    "LBFGS": "d of 'it'",
    "several": "optimizer 1: lr of parameter group 0",
    "second group": "weight_decay of parameter group 1",
    "master weights": "weights of 'parameter 0 of group 0'",
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_differs_in_an_optimizer_is_named(name: str) -> None:
    seen = looked(f"{HERE}:OPTIMIZERS", 3, 1)[name]
    key = name.partition(" of ")[0]
    named = _NAMED.get(name) or (f"{key} of parameter group 0" if key == "lr" else f"{key} of 'it'")

    assert seen.names == (named,)
    assert (seen.phase, seen.ranks) == ("step", (1,))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_alike_are_identical(name: str) -> None:
    assert looked(f"{HERE}:OPTIMIZERS", 2, 0, 1)[name].identical


LABELS = {"label": _group_with_a_label}


def test_a_setting_whose_text_looks_like_a_tensor_is_told_as_text() -> None:
    assert looked(f"{HERE}:LABELS", 2, 1)["label"].names == ("label of parameter group 0",)
