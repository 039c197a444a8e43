"""backward() inside torch.inference_mode(), which torch allows: gradients are then inference tensors."""

from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}, {"reproducible": True}])
@pytest.mark.parametrize("first_inside", [False, True])
def test_a_backward_inside_inference_mode_works_as_in_plain_torch(
    options: dict[str, Any], *, first_inside: bool
) -> None:
    net = nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 1))  # the first weight moves during backward
    model = LegacyDistributedDataParallel(net, **options)
    for step, inside in enumerate([first_inside, not first_inside, True, False]):
        batch = torch.full((1, 200), 1.0 + step)
        loss = model(batch).sum()
        with torch.inference_mode(inside):
            loss.backward()
        record = model.all_reduce(sample_size=1)
        expected = torch.autograd.grad(net(batch).sum(), list(net.parameters()))
        assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), expected, strict=True))
        assert not any(parameter.grad.is_inference() for parameter in net.parameters())
        assert record.rows[0].micro_batches == 1
        model.zero_grad()
