"""Parameters whose contents torch.utils.swap_tensors() exchanged, as module conversions do on request."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, UnsynchronizedStepError, all_reduce_gradients

pytestmark = pytest.mark.usefixtures("alone")


def _swap(net: nn.Module, dtype: torch.dtype) -> None:
    for parameter in net.parameters():
        other = nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, other)


def _backward(model: nn.Module) -> None:
    model(torch.ones(1, 200, dtype=next(model.parameters()).dtype)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backward_passes_and_steps_are_still_watched_after_a_swap(dtype: torch.dtype) -> None:
    net = nn.Linear(200, 100)
    model = LegacyDistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _backward(model)
    model.all_reduce()
    model.zero_grad()

    _swap(net, dtype)
    model.all_reduce()  # sees that the parameters are others
    _backward(model)
    _backward(model)

    moved = not net.weight.grad.untyped_storage().resizable()  # to its slot, in the middle of a flat tensor
    with pytest.raises(UnsynchronizedStepError, match="'weight'"):
        optimizer.step()
    assert model.all_reduce().rows[0].micro_batches == 2
    assert moved
    assert net.weight.grad.unique().tolist() == [2.0]


@pytest.mark.parametrize("swaps", range(1, 7))
def test_all_parameters_are_counted_after_any_number_of_swaps_that_reuse_addresses(swaps: int) -> None:
    net = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(4)])
    model = LegacyDistributedDataParallel(net)
    for _ in range(swaps):
        _swap(net, torch.float32)
    model.all_reduce()  # sees that the parameters are others
    torch.stack([parameter.sum() for parameter in net]).sum().backward()

    assert model._synchronizer.planner.counter._counts == [1, 1, 1, 1]


def test_two_parameters_that_exchanged_their_contents_are_both_guarded() -> None:
    net = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])
    model = LegacyDistributedDataParallel(net)
    torch.utils.swap_tensors(net[0], net[1])
    model.all_reduce()
    net[0].sum().backward()

    with pytest.raises(UnsynchronizedStepError, match="'0'"):
        torch.optim.SGD(net.parameters(), lr=0.1).step()


FORMS: dict[str, Callable[[nn.Module], object]] = {"module": lambda net: net, "list": lambda net: [*net.parameters()]}


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_what_all_reduce_gradients_reduced_can_be_swapped_and_is_remembered(form: str, *, is_frozen: bool) -> None:
    net = nn.Linear(200, 100)
    net.weight.requires_grad_(not is_frozen)  # the first of the parameters
    for call in range(1, 4):
        net.zero_grad()
        _backward(net)
        assert all_reduce_gradients(FORMS[form](net)).call == call
        assert net.bias.grad.unique().tolist() == [1.0]
        net.zero_grad()
        _swap(net, torch.float64 if call == 1 else torch.float32)
