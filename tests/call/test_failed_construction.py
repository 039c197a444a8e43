"""A failed construction leaves nothing on the module."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LayoutError, LegacyDDPError, LegacyDistributedDataParallel
from tests.helpers.guarded import assert_steps, backward, net
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks


def _count_hooks(module: nn.Module) -> int:
    """The hooks on gradients of its parameters."""
    return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in module.parameters())


def _other_layouts(rank: int) -> tuple[nn.Module, type[LegacyDDPError]]:
    return nn.Sequential(net(), nn.Linear(1, 1 + rank)), LayoutError


class _Interrupting(nn.Linear):
    """Ctrl-C while the wrapper sends buffers, behind what all ranks agreed on."""

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        if _count_hooks(self):
            raise KeyboardInterrupt
        return super().named_buffers(*args, **kwargs)


def _interrupted(_: int) -> tuple[nn.Module, type[BaseException]]:
    return _Interrupting(3, 1), KeyboardInterrupt


def _train_alone(make: Callable[[int], tuple[nn.Module, type[BaseException]]], rank: int) -> tuple[int, bool]:
    module, expected = make(rank)
    with pytest.raises(expected) as caught:  # keeps the error, its frames, and so the wrapper
        LegacyDistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    weight = next(module.parameters())
    before = weight.detach().clone()
    backward(module)
    optimizer.step()  # of the plain module, on this rank alone
    stepped = torch.equal(weight, before - 0.5 * weight.grad)
    assert caught.value is not None
    return _count_hooks(module), stepped


@pytest.mark.parametrize("make, world_size", [(_other_layouts, 2), (_interrupted, 1)])
def test_a_module_whose_wrapper_failed_is_trained_without_it(
    make: Callable[[int], tuple[nn.Module, type[BaseException]]], world_size: int
) -> None:
    assert run_ranks(partial(_train_alone, make), world_size) == [(0, True)] * world_size


@on_ranks(2, [True, True])
def test_a_second_wrapper_does_not_use_the_settings_of_the_first(rank: int) -> bool:
    module = net()
    with pytest.raises(LayoutError) as caught:
        LegacyDistributedDataParallel(module, buffer_size=1 + rank)
    model = LegacyDistributedDataParallel(module, checks=Checks(unsynchronized_step="allow"))
    backward(model)
    assert_steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return caught.value.ranks == ()
