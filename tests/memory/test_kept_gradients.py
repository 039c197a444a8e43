"""Gradients that the user keeps: their values stay, whatever happened to the gradient they were taken from."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel

pytestmark = pytest.mark.usefixtures("alone")


def _replace_data(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.grad.data = torch.full_like(parameter, 7.0)


REPLACE: dict[str, Callable[[nn.Module], object]] = {
    ".grad.data = ...": _replace_data,
    "half() and float()": lambda net: net.half().float(),
    "_apply(clone)": lambda net: net._apply(torch.clone),
}
KEEP: dict[str, Callable[[torch.Tensor], Any]] = {
    "detach()": torch.Tensor.detach,
    "a row": lambda grad: grad.detach()[1],
    "numpy()": lambda grad: grad.detach().numpy(),
}


def _step(model: LegacyDistributedDataParallel, value: float, *, set_to_none: bool = True) -> None:
    model.zero_grad(set_to_none=set_to_none)
    model(torch.full((1, 200), value)).sum().backward()
    model.all_reduce()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("replace", REPLACE)
def test_a_kept_view_keeps_its_values_after_its_gradient_got_other_memory(
    replace: str, keep: str, *, set_to_none: bool
) -> None:
    net = nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 2))  # one gradient moves during backward, the others do not
    model = LegacyDistributedDataParallel(net)
    _step(model, 1.0)
    kept = [KEEP[keep](parameter.grad) for parameter in (net[0].weight, net[1].weight)]
    values = [torch.as_tensor(view).clone() for view in kept]

    REPLACE[replace](net)
    for step in range(3):
        _step(model, 2.0 + step, set_to_none=set_to_none)
        assert all(torch.equal(torch.as_tensor(view), value) for view, value in zip(kept, values, strict=True))

    expected = torch.autograd.grad(net(torch.full((1, 200), 4.0)).sum(), list(net.parameters()))
    assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), expected, strict=True))


def test_a_loop_variable_left_over_makes_calls_take_turns_in_two_flat_tensors() -> None:
    net = nn.Linear(200, 100)
    model = LegacyDistributedDataParallel(net)
    left_over, values, places = torch.zeros(()), torch.zeros(()), []
    for step in range(6):
        _step(model, 1.0 + step)
        assert torch.equal(left_over, values)  # of the step before
        for parameter in net.parameters():
            left_over = parameter.grad
        values = left_over.clone()
        places.append([parameter.grad.data_ptr() for parameter in net.parameters()])

    assert places == [places[0], places[1]] * 3
    assert places[0] != places[1]


def test_the_second_flat_tensor_goes_when_no_gradient_is_kept_any_more() -> None:
    net = nn.Linear(200, 100)
    model = LegacyDistributedDataParallel(net)
    _step(model, 1.0)
    kept = net.weight.grad
    _step(model, 2.0)
    del kept
    _step(model, 3.0)

    (buffer,) = model._plan().buffers
    assert buffer.spare is None
