"""A cross-check puts the state of model and process back, bit for bit, whatever a run changes."""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from legacy_ddp.debug import cross_check
from tests.helpers.cases import bits_of
from tests.helpers.cross_faults import Net, batch_of, loss_of
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import thorough


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    net(torch.randn(5, 3)).sum().backward()
    return net


def _everything(net: nn.Module) -> list[object]:
    tensors = [*net.parameters(), *net.buffers()]
    return [
        [(id(tensor), tensor._version, bits_of(tensor)) for tensor in tensors],
        [(id(item.grad), item.grad._version, bits_of(item.grad)) for item in net.parameters() if item.grad is not None],
        [list(child._buffers) for child in net.modules()],
    ]


Batch = torch.Tensor


def _run(net: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = net(batch).sum()
    return loss


def _replace_buffer(net: nn.Module, batch: Batch) -> torch.Tensor:
    loss = _run(net, batch)
    net[1].running_mean = net[1].running_mean * 2
    net[1].register_buffer("more", torch.ones(1))
    del net[1].num_batches_tracked
    return loss


def _write(net: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        net[0].weight.mul_(2)
        net[0].bias.data += 1
    return _run(net, batch)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("run", [_run, _replace_buffer, _write])
def test_everything_is_put_back(run: Callable[[nn.Module, Batch], torch.Tensor]) -> None:
    net, batch = _net(), torch.randn(5, 3)
    before = _everything(net)

    assert cross_check(net, run, batch).agrees

    assert _everything(net) == before


@pytest.mark.usefixtures("alone")
def test_a_graph_of_the_user_survives() -> None:
    net = _net()
    loss = net(torch.ones(5, 3)).square().sum()
    expected = torch.autograd.grad(loss, net[0].weight, retain_graph=True)[0]

    assert cross_check(net, _write, torch.ones(5, 3)).agrees

    assert torch.equal(torch.autograd.grad(loss, net[0].weight)[0], expected)


_LATE_SECONDS = 0.6  # more than the time between two looks at an operation under way


def _check(rank: int, late: int, without: int) -> tuple[bool, bool]:
    """Whether all agree, and whether this rank came late."""
    empty, slept = torch.empty, []

    def late_empty(*args: Any, **options: Any) -> torch.Tensor:
        """The memory for the batch of the rank before is made between the exchange of sizes and that of batches."""
        if options.get("dtype") is torch.uint8:
            slept.append(time.sleep(_LATE_SECONDS))
        return empty(*args, **options)

    with mock.patch.object(torch, "empty", late_empty if rank == late else empty):
        agrees = cross_check(Net(nn.Tanh()), loss_of, None if rank == without else batch_of(rank)).agrees
    return agrees, bool(slept)


@pytest.mark.parametrize("size, late, without", [thorough(2, 1, 0), (3, 1, 9), (3, 2, 1)])
def test_a_rank_late_for_the_exchange_of_batches_breaks_no_connection(size: int, late: int, without: int) -> None:
    assert run_ranks(_check, size, late, without) == [(True, rank == late) for rank in range(size)]
