"""Around runs of a batch the state of model and process is put back, bit for bit."""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from legacy_ddp.debug import cross_check
from legacy_ddp.debug._cross_check import trial
from legacy_ddp.debug._cross_check.run import generator_states, state_set_aside
from legacy_ddp.debug._cross_check.trial import pass_on
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
        [child.training for child in net.modules()],
        [list(child._buffers) for child in net.modules()],
        (bits_of(torch.get_rng_state()), random.getstate(), np.random.get_state()[1].tobytes()),
    ]


def _run(net: nn.Module) -> None:
    net(torch.randn(5, 3)).sum().backward()


def _draw(net: nn.Module) -> None:
    torch.rand(3)
    random.random()
    np.random.rand(3)


def _replace_buffer(net: nn.Module) -> None:
    net[1].running_mean = net[1].running_mean * 2
    net[1].register_buffer("more", torch.ones(1))
    del net[1].num_batches_tracked


def _write(net: nn.Module) -> None:
    with torch.no_grad():
        net[0].weight.mul_(2)
        net[0].bias.data += 1


def _modes(net: nn.Module) -> None:
    net.eval()
    net[2].train()


@pytest.mark.parametrize("act", [_run, _draw, _replace_buffer, _write, _modes])
def test_everything_is_put_back(act: Callable[[nn.Module], None]) -> None:
    net = _net()
    before = _everything(net)

    with state_set_aside(net) as saved:
        for _ in range(2):
            saved.begin_run(saved.generators, {})
            assert all(parameter.grad is None for parameter in net.parameters())
            act(net)

    assert _everything(net) == before


def test_everything_is_put_back_after_an_exception() -> None:
    net = _net()
    before = _everything(net)

    with suppress(KeyError), state_set_aside(net) as saved:
        saved.begin_run(saved.generators, {})
        _run(net)
        _write(net)
        raise KeyError

    assert _everything(net) == before


def test_a_run_begins_with_the_given_generators_and_tensors() -> None:
    net, seen = _net(), []
    with state_set_aside(net) as saved:
        for mean in (1.0, 2.0):
            saved.begin_run(saved.generators, {"1.running_mean": torch.full((4,), mean)})
            seen.append((float(torch.rand(())), random.random(), np.random.rand(), net[1].running_mean.tolist()))
            _draw(net)

    assert seen[0][:3] == seen[1][:3]
    assert (seen[0][3], seen[1][3]) == ([1.0] * 4, [2.0] * 4)


def test_hooks_after_accumulation_do_not_run_inside_and_run_again_afterwards() -> None:
    net, calls = _net(), list[int]()
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: calls.append(1))

    with state_set_aside(net) as saved:
        saved.begin_run(saved.generators, {})
        _run(net)
    assert calls == []

    _run(net)
    assert len(calls) == len(list(net.parameters()))


def test_a_graph_of_the_user_survives() -> None:
    net = _net()
    loss = net(torch.ones(5, 3)).square().sum()
    expected = torch.autograd.grad(loss, net[0].weight, retain_graph=True)[0]

    with state_set_aside(net) as saved:
        saved.begin_run(saved.generators, {"1.running_mean": torch.zeros(4)})
        _run(net)

    assert torch.equal(torch.autograd.grad(loss, net[0].weight)[0], expected)


def test_the_states_of_generators_hold_numpy_only_where_it_is_used() -> None:
    assert {"cpu", "devices", "modules", "python", "numpy"} == set(generator_states(nn.Linear(1, 1)))


_LATE_SECONDS = 0.6  # more than the time between two looks at an operation under way


def _late(*args: Any) -> Any:
    time.sleep(_LATE_SECONDS)
    return pass_on(*args)


def _check(rank: int, late: int, without: int) -> bool:
    with mock.patch.object(trial, "pass_on", _late if rank == late else pass_on):
        return cross_check(Net(nn.Tanh()), loss_of, None if rank == without else batch_of(rank)).agrees


@pytest.mark.parametrize("size, late, without", [thorough(2, 0, 9), thorough(2, 1, 0), (3, 1, 9), (3, 2, 1)])
def test_a_rank_late_for_the_exchange_of_batches_breaks_no_connection(size: int, late: int, without: int) -> None:
    assert run_ranks(_check, size, late, without) == [True] * size
