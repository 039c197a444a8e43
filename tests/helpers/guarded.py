"""A small wrapped net, and short ways to see that a step was refused or made."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from legacy_ddp import LegacyDistributedDataParallel, UnsynchronizedStepError

Model = LegacyDistributedDataParallel


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def backward(model: nn.Module, factor: float = 1.0) -> None:
    (model(torch.ones(2, 3)).sum() * factor).backward()


def _copies(model: nn.Module, optimizer: Optimizer) -> list[object]:
    """All that a step may change."""
    values = [parameter.detach().clone() for parameter in model.parameters()]
    grads = [None if p.grad is None else p.grad.detach().to_dense().clone() for p in model.parameters()]
    return [values, grads, copy.deepcopy(optimizer.state_dict())]


def _assert_same(actual: object, expected: object) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor)
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict | list):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)  # type: ignore[arg-type]
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            _assert_same(actual[key], expected[key])  # type: ignore[index]
    else:
        assert actual == expected


@contextmanager
def refused(model: nn.Module, optimizer: Optimizer) -> Iterator[pytest.ExceptionInfo[UnsynchronizedStepError]]:
    """What happens in the block is refused and changes nothing."""
    before = _copies(model, optimizer)
    with pytest.raises(UnsynchronizedStepError) as caught:
        yield caught
    _assert_same(_copies(model, optimizer), before)


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
