"""Training on the simulated device: the weights of one process on the joined batch, and the faults that it shows."""

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers.ranks import run_ranks
from tests.helpers.simulated_device import device
from tests.helpers.simulated_group import new_group

STEPS, MICRO_BATCHES, ITEMS = 3, 4, 8
Result = tuple[list[torch.Tensor], dict[str, int], list[str]]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def _batches() -> torch.Tensor:
    return torch.randn(STEPS, MICRO_BATCHES, ITEMS, 3, generator=torch.Generator().manual_seed(1))


def _train(rank: int, settings: dict[str, Any], *, waits: bool = True, has_float64: bool = True) -> Result:
    """Weights, waits of the host inside of the library, and races of rank ``rank`` of 2."""
    group = new_group()
    group.waits, device.has_float64 = waits, has_float64
    model = LegacyDistributedDataParallel(_model().to("sim"), process_group=group, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    device.host_waits.clear()
    for batches in _batches()[:, rank::2].to("sim"):
        for number, batch in enumerate(batches, 1):
            is_last = number == len(batches)
            with contextlib.nullcontext() if is_last else model.no_sync():
                model(batch).pow(2).sum().backward()
        model.all_reduce(sample_size=len(batches) * ITEMS)
        optimizer.step()
        optimizer.zero_grad()
    waited = {place: count for place, count in device.host_waits.items() if place}
    return [parameter.detach().cpu() for parameter in model.parameters()], waited, device.races


def _train_in_one_process() -> list[torch.Tensor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batches in _batches():
        optimizer.zero_grad()
        for batch in batches:
            (model(batch).pow(2).sum() / (MICRO_BATCHES * ITEMS)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


SETTINGS: list[tuple[dict[str, Any], int]] = [  # with the waits of the host in a step
    ({}, 0),
    ({"checks": "off"}, 0),
    ({"buffer_size": 8}, 0),
    ({"gradient_as_bucket_view": False}, 0),
    ({"reproducible": True}, 1),  # whether zero_grad() came between blocks
    ({"checks": Checks(nonfinite="raise")}, 1),
]


@pytest.mark.parametrize("settings, waits", SETTINGS, ids=lambda value: str(value)[:40])
def test_ranks_on_a_device_have_the_weights_of_one_process(settings: dict[str, Any], waits: int) -> None:
    expected = _train_in_one_process()

    for weights, waited, races in run_ranks(partial(_train, settings=settings), 2, fresh=True):
        for mine, one in zip(weights, expected, strict=True):
            torch.testing.assert_close(mine, one)
        assert races == []
        assert sum(waited.values()) == waits * STEPS, waited


def test_a_device_without_doubles_trains_alike() -> None:
    results = run_ranks(partial(_train, settings={}, has_float64=False), 2, fresh=True)

    for weights, _, _ in results:
        for mine, one in zip(weights, _train_in_one_process(), strict=True):
            torch.testing.assert_close(mine, one)


def test_waits_that_do_nothing_are_found_as_races_and_give_other_weights() -> None:
    """The negative control of the detector."""
    expected = _train_in_one_process()

    for weights, _, races in run_ranks(partial(_train, settings={}, waits=False), 2, fresh=True):
        assert any("_collectives/" in race for race in races)
        assert not all(torch.allclose(mine, one) for mine, one in zip(weights, expected, strict=True))
