"""Descriptions of the parameters in optimizers. One process."""

import pytest
import torch
from torch import nn

from legacy_ddp._buckets.layout import distinct
from legacy_ddp._replicas.state import describe_membership, parameter_groups

Tensors = list[nn.Parameter]


def _net() -> nn.Module:
    net = nn.Module()
    for name in "abcde":
        net.register_parameter(name, nn.Parameter(torch.ones(2, ord(name) - ord("a") + 1)))
    net.e.requires_grad_(False)
    return net


def _like(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.zeros_like(tensor))


def _hold(net: nn.Module, case: str) -> Tensors:
    a, b, c, d, e = net.parameters()
    return {
        "all": [a, b, c, d, e],
        "all trainable": [a, b, c, d],
        "one left out": [a, b, d],
        "one replaced": [a, _like(b), c, d],
        "a head of its own": [a, b, c, d, _like(torch.ones(7))],
        "a head of its own and one left out": [a, b, d, _like(torch.ones(7))],
        "nothing": [_like(tensor) for tensor in (a, b, c, d)],
    }[case]


@pytest.mark.parametrize(
    "case, words, is_lost",
    [
        ("all", "5 of the model's 5 parameters", False),
        ("all trainable", "4 of the model's 5 parameters", False),
        ("one left out", "3 of the model's 5 parameters, without 'c'", False),
        (
            "one replaced",
            "3 of the model's 5 parameters, without 'b', with a tensor that is not in the model: float32 (2, 2)",
            True,
        ),
        (
            "a head of its own",
            "4 of the model's 5 parameters, with a tensor that is not in the model: float32 (7,)",
            False,
        ),
        (
            "a head of its own and one left out",
            "3 of the model's 5 parameters, without 'c', with a tensor that is not in the model: float32 (7,)",
            False,
        ),
        (
            "nothing",
            "0 of the model's 5 parameters, without 'a', 'b', 'c' and 1 more, with 4 tensors that are not in the model:"
            " float32 (2, 1), float32 (2, 2), float32 (2, 3) and 1 more",
            True,
        ),
    ],
)
def test_what_an_optimizer_holds_is_said_and_a_parameter_that_got_lost_noticed(
    case: str, words: str, is_lost: bool
) -> None:
    net = _net()
    optimizer = torch.optim.SGD(_hold(net, case), lr=0.5)

    assert describe_membership([optimizer], distinct(net.named_parameters())) == (words, is_lost)


def test_each_parameter_has_its_group() -> None:
    net = _net()
    first = torch.optim.SGD([{"params": [net.a]}, {"params": [net.b, net.c]}], lr=0.5)
    second = torch.optim.SGD([net.c, net.d], lr=0.5)

    assert [(item.name, item.value) for item in parameter_groups([first, second], net, {"d"})] == [
        ("parameter group of 'a'", "0 of optimizer 0"),
        ("parameter group of 'b'", "1 of optimizer 0"),
        ("parameter group of 'c'", "1 of optimizer 0, 0 of optimizer 1"),
        ("parameter group of 'e'", "none"),
    ]
    assert parameter_groups([], net, ()) == []
