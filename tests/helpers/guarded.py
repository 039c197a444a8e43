"""A small wrapped net, and short ways to see that a step was refused or made."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from legacy_ddp import LegacyDistributedDataParallel, UnsynchronizedStepError
from tests.helpers.cases import bits_of

Model = LegacyDistributedDataParallel


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def backward(model: nn.Module, factor: float = 1.0) -> None:
    (model(torch.ones(2, 3)).sum() * factor).backward()


def _state(model: nn.Module, optimizer: Optimizer) -> object:
    """All that a step may change, each tensor as its bits."""
    parameters = list(model.parameters())
    tree = [parameters, [parameter.grad for parameter in parameters], optimizer.state_dict()]
    return tree_map(lambda leaf: bits_of(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf, tree)


@contextmanager
def refused(model: nn.Module, optimizer: Optimizer) -> Iterator[pytest.ExceptionInfo[UnsynchronizedStepError]]:
    """What happens in the block is refused and changes nothing."""
    before = _state(model, optimizer)
    with pytest.raises(UnsynchronizedStepError) as caught:
        yield caught
    assert _state(model, optimizer) == before


def assert_steps(model: nn.Module, optimizer: Optimizer) -> None:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    assert not all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def assert_guards(model: Model, optimizer: Optimizer) -> None:
    """A forgotten call is refused, and one that follows is not."""
    optimizer.zero_grad()
    backward(model)
    with refused(model, optimizer):
        optimizer.step()
    model.all_reduce()
    assert_steps(model, optimizer)
