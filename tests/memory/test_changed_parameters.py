"""Parameters that change under the wrapper: their number, their memory, and their contents."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, UnsynchronizedStepError, all_reduce_gradients
from tests.helpers.shared_jobs import run_cases
from tests.helpers.small_models import Net, add_gradients, error_of, gradient_values, step
from tests.helpers.small_sizes import SMALLEST_MOVED_BYTES, move_gradients_from

# Calls after the parameters changed: the next call uses the new parameters


def _add_lora(net: Any) -> None:
    net.head.requires_grad_(False)
    net.head.down, net.head.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": id,
    "freeze": lambda net: net.conv.requires_grad_(False),
    "unfreeze": lambda net: net.frozen.requires_grad_(True),
    "add": _add_lora,
    "replace-layer": lambda net: setattr(net, "head", nn.Linear(4, 4)),
    "replace-parameter": lambda net: setattr(net.head, "bias", nn.Parameter(torch.ones(4, dtype=torch.float64))),
    "remove": lambda net: delattr(net, "head"),
    "rename": lambda net: setattr(net, "aa", net._modules.pop("head")),
    "tie": lambda net: setattr(net, "tied", net.head),
    "double": lambda net: net.double(),
    "bfloat16": lambda net: net.bfloat16(),
    "memory-format": lambda net: net.to(memory_format=torch.channels_last),
    "data": lambda net: setattr(net.head.weight, "data", torch.zeros(4, 4).T.contiguous().T),
    "freeze-all": lambda net: net.requires_grad_(False),
}


def _change_between_steps(rank: int, how: str, smallest_moved: int) -> list[Any]:
    move_gradients_from(smallest_moved)
    net = Net()
    model = LegacyDistributedDataParallel(net)
    step(model, rank)
    _CHANGES[how](net)
    seen = []
    for value in (2, 3):
        model.zero_grad()
        if any(parameter.requires_grad for parameter in net.parameters()):
            add_gradients(model, value + rank)
        record = model.all_reduce()
        for parameter in net.parameters():
            assert parameter.grad is None or parameter.grad.stride() == parameter.stride()
            assert parameter.grad is None or parameter.grad.dtype == parameter.dtype
        trainable = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
        seen.append(({name: grad for name, grad in gradient_values(net).items() if name in trainable}, trainable))
        assert [row.micro_batches for row in record.rows] == [int(bool(trainable))] * 2
    return seen


def test_the_next_call_follows_whatever_changed_after_wrapping() -> None:
    """Also where gradients move to their slots during backward."""
    cases = {f"{how}, {size}": (how, size) for how in _CHANGES for size in (SMALLEST_MOVED_BYTES, 0)}
    for how, of_ranks in run_cases(_change_between_steps, 2, cases, fresh=True).items():
        for seen in of_ranks:
            for mean, (grads, trainable) in zip([2.5, 3.5], seen, strict=True):
                assert grads == dict.fromkeys(trainable, mean), how


def _untie(rank: int, guilty: tuple[int, ...]) -> list[Any]:
    net: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    model = LegacyDistributedDataParallel(net)
    step(model, rank)
    if rank in guilty:
        net[1].weight = nn.Parameter(net[0].weight.detach().clone())
    model.zero_grad()
    add_gradients(model, float(rank))
    return [error_of(model.all_reduce), gradient_values(model)]


def test_a_weight_untied_after_wrapping_gets_a_gradient_of_its_own_and_on_one_rank_is_named_on_all() -> None:
    found = run_cases(_untie, 2, {"both": ((0, 1),), "one": ((1,),)})

    assert found["both"] == [[None, {"0.weight": 0.5, "1.weight": 0.5}]] * 2
    for (kind, text), _ in found["one"]:
        assert kind == "LayoutError"
        assert "shared with 1.weight" in text


# Parameters whose contents torch.utils.swap_tensors() exchanged, as module conversions do on request


def _swap(net: nn.Module, dtype: torch.dtype) -> None:
    for parameter in net.parameters():
        other = nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, other)


def _backward(model: nn.Module) -> None:
    model(torch.ones(1, 200, dtype=next(model.parameters()).dtype)).sum().backward()


@pytest.mark.usefixtures("alone")
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


@pytest.mark.usefixtures("alone")
def test_all_parameters_are_counted_after_any_number_of_swaps_that_reuse_addresses() -> None:
    for swaps in range(1, 7):
        net = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(4)])
        model = LegacyDistributedDataParallel(net)
        for _ in range(swaps):
            _swap(net, torch.float32)
        model.all_reduce()  # sees that the parameters are others
        torch.stack([parameter.sum() for parameter in net]).sum().backward()
        assert model._synchronizer.planner.counter._counts == [1, 1, 1, 1], swaps


@pytest.mark.usefixtures("alone")
def test_two_parameters_that_exchanged_their_contents_are_both_guarded() -> None:
    net = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])
    model = LegacyDistributedDataParallel(net)
    torch.utils.swap_tensors(net[0], net[1])
    model.all_reduce()
    net[0].sum().backward()

    with pytest.raises(UnsynchronizedStepError, match="'0'"):
        torch.optim.SGD(net.parameters(), lr=0.1).step()


FORMS: dict[str, Callable[[nn.Module], object]] = {"module": lambda net: net, "list": lambda net: [*net.parameters()]}


@pytest.mark.usefixtures("alone")
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
