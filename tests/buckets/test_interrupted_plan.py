"""Ctrl-C while the hooks of a plan are registered: the next call plans again."""

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel


class _Interrupting(nn.Parameter):
    """A parameter that raises once, when a hook is registered on it for the second time."""

    registrations = 0

    def register_post_accumulate_grad_hook(self, hook: object) -> object:
        type(self).registrations += 1
        if self.registrations == 2:
            raise KeyboardInterrupt
        return super().register_post_accumulate_grad_hook(hook)


@pytest.mark.usefixtures("alone")
def test_an_interrupt_while_hooks_are_registered_does_not_break_the_wrapper() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].bias = _Interrupting(torch.zeros(2))
    model = LegacyDistributedDataParallel(net)
    net[0].weight.requires_grad_(False)  # plan anew
    with pytest.raises(KeyboardInterrupt):
        model.all_reduce()

    counts = []
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        counts.append(model.all_reduce().rows[0].micro_batches)
        assert net[1].bias.grad.tolist() == [1.0, 1.0]
    assert counts[1:] == [1, 1]  # the first backward ran before all hooks were there
