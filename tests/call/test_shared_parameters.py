"""Parameters of two calls: sample_size divides them once, or the second call refuses."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import GradientError, LegacyDistributedDataParallel, all_reduce_gradients
from tests.helpers.shared_jobs import on_ranks, run_cases

Calls = tuple[Callable[..., Any], Callable[..., Any]]


def _tied() -> tuple[nn.Embedding, nn.Linear]:
    encoder, decoder = nn.Embedding(4, 3), nn.Linear(3, 4)
    decoder.weight = encoder.weight
    return encoder, decoder


def _backward(encoder: nn.Module, decoder: nn.Module, rank: int) -> None:
    decoder(encoder(torch.tensor([rank, 2]))).sum().backward()


def _modules(*modules: nn.Module) -> Calls:
    return tuple(lambda module=module, **options: all_reduce_gradients(module, **options) for module in modules)


def _lists(*modules: nn.Module) -> Calls:
    """Both begin with the tied weight: two lists of one synchronizer."""
    return tuple(lambda module=m, **options: all_reduce_gradients(module.parameters(), **options) for m in modules)


def _wrappers(*modules: nn.Module, **options: Any) -> Calls:
    return tuple(LegacyDistributedDataParallel(module, **options).all_reduce for module in modules)


FORMS: dict[str, Callable[..., Calls]] = {
    "modules": _modules,
    "lists": _lists,
    "wrappers": _wrappers,
    "wrappers without views": lambda *modules: _wrappers(*modules, gradient_as_bucket_view=False),
}


def _divide_twice(rank: int, form: str) -> list[tuple[str, str | None, bool]]:
    encoder, decoder = _tied()
    first, second = FORMS[form](encoder, decoder)
    seen = []
    for step in range(2):  # in the first step of a function no hook was there during backward
        encoder.zero_grad()
        decoder.zero_grad()
        _backward(encoder, decoder, rank)
        first(sample_size=2)
        if step:
            encoder.weight.grad.mul_(3.0)  # what is edited was divided all the same
        before = [parameter.grad.clone() for parameter in decoder.parameters()]
        with pytest.raises(GradientError) as caught:
            second(sample_size=2)
        untouched = all(torch.equal(p.grad, grad) for p, grad in zip(decoder.parameters(), before, strict=True))
        seen.append((str(caught.value), caught.value.parameter, untouched))
    return seen


def test_a_tied_weight_is_not_divided_by_sample_size_in_two_calls() -> None:
    of_forms = run_cases(_divide_twice, 2, {form: (form,) for form in FORMS})
    for form, seen in of_forms.items():
        for text, name, untouched in chain(*seen):
            assert name == ("000000" if form == "lists" else "weight")
            assert f"grad of {name!r} was reduced by an earlier call" in text
            assert untouched


@on_ranks(2, [None] * 2)
def test_a_tied_weight_in_one_call_has_the_gradient_of_the_joined_batch(rank: int) -> None:
    encoder, decoder = _tied()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.linspace(0, 1, parameter.numel()).view_as(parameter))
    _backward(encoder, decoder, rank)
    all_reduce_gradients([*encoder.parameters(), decoder.bias], sample_size=2)
    reduced = [parameter.grad.clone() for parameter in decoder.parameters()]
    decoder.zero_grad()
    for other in range(2):  # the items of both ranks in one process
        _backward(encoder, decoder, other)
    for grad, parameter in zip(reduced, decoder.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad / 4)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("form", FORMS)
def test_calls_that_share_a_weight_succeed_where_nothing_is_divided_twice(form: str) -> None:
    encoder, decoder = _tied()
    first, second = FORMS[form](encoder, decoder)
    for _ in range(2):
        _backward(encoder, decoder, 0)
        first()
        second()  # the mean of equal values
        first(sample_size=1, skip=True)
        encoder.weight.grad = torch.ones(4, 3)  # assigned by hand: another gradient
        second(sample_size=2)
        assert encoder.weight.grad.unique().tolist() == [0.5]
        encoder.zero_grad()
        decoder.zero_grad(set_to_none=False)
        _backward(encoder, decoder, 0)
        second(sample_size=2)
        encoder.zero_grad(set_to_none=False)
        first(sample_size=2)  # of zeros: a rank without data
        decoder.zero_grad()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("as_views", [True, False])
def test_gradients_assigned_by_hand_are_no_second_division_after_a_layer_was_frozen(*, as_views: bool) -> None:
    for _ in range(20):  # the address of a gradient that is gone may be that of the next one
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model = LegacyDistributedDataParallel(net, gradient_as_bucket_view=as_views)
        for step in range(4):
            model.zero_grad()
            net[0].requires_grad_(step < 2)
            trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
            for parameter, grad in zip(
                trained, torch.autograd.grad(model(torch.ones(1, 2)).sum(), trained), strict=True
            ):
                parameter.grad = grad
            model.all_reduce(sample_size=2)
            assert net[1].bias.grad.tolist() == [0.5, 0.5]


@pytest.mark.usefixtures("alone")
def test_a_gradient_divided_before_a_layer_was_frozen_is_not_divided_again_and_the_error_has_the_next_step() -> None:
    net = nn.Linear(2, 2)
    model = LegacyDistributedDataParallel(net)
    model(torch.ones(1, 2)).sum().backward()
    model.all_reduce(sample_size=2)
    net.bias.requires_grad_(False)
    with pytest.raises(GradientError, match="'weight' was reduced by an earlier call"):
        model.all_reduce(sample_size=2)
    net.weight.grad.copy_(torch.ones(2, 2))
    with pytest.raises(GradientError, match="a gradient that you write yourself: assign a new tensor"):
        model.all_reduce(sample_size=2)
    net.weight.grad = torch.ones(2, 2)
    model.all_reduce(sample_size=2)
    assert net.weight.grad.unique().tolist() == [0.5]
