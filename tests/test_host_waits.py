"""How often the host waits for a simulated device: in a call, with ``checks="detail"``, and with a recorder."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp._torch import device as devices
from legacy_ddp.debug import Recorder
from legacy_ddp.debug._trace.snapshot import Measured, begin_measure
from tests.helpers import logged_warnings
from tests.helpers.ranks import run_ranks
from tests.helpers.simulated_device import device
from tests.helpers.simulated_group import new_group
from tests.helpers.small_models import backward_on_device, wrap_on_device
from tests.helpers.torch_versions import needs_simulation

pytestmark = needs_simulation
STEPS = 3


def _waits() -> Counter[str]:
    """The waits of the host inside of the library since the last time, by line."""
    found = Counter({place: count for place, count in device.host_waits.items() if place})
    device.host_waits.clear()
    return found


def _counts_waits(rank: int) -> dict[str, tuple[dict[str, int], Any]]:
    """By case: the waits of the host inside of the library in a call, by line, and a result of the call."""
    group, found = new_group(), {}

    def call(model: LegacyDistributedDataParallel, name: str, **arguments: Any) -> Any:
        device.host_waits.clear()
        record = model.all_reduce(**arguments)
        found[name] = dict(_waits()), record
        return record

    on_device = {"sample_size": torch.tensor(3, device="sim"), "metrics": {"loss": torch.tensor(1.5, device="sim")}}
    for policy in ("warn", "raise", "skip"):
        model = wrap_on_device(group, checks=Checks(nonfinite=policy))
        backward_on_device(model, rank)
        call(model, f"device values, {policy}", **on_device)
    model.zero_grad()
    backward_on_device(model, rank, first=float("nan") if rank == 1 else 1.0)
    call(model, "a report of skip")
    model.zero_grad()
    backward_on_device(model, rank)
    call(model, "a part of no items", sample_size=torch.tensor(4.0 * rank, device="sim"))
    bias_grad = model.module[2].bias.grad.cpu().tolist()
    model.zero_grad(set_to_none=False)
    call(model, "cleared in place")
    call(model, "cleared in place, with items", sample_size=4)
    if rank == 0:
        model.module[0].weight.grad = torch.ones(4, 3, device="sim", requires_grad=True)
    call(model, "no items, and a gradient that cannot be used", sample_size=torch.tensor(4 * rank, device="sim"))
    told = [text.splitlines()[0] for text in logged_warnings.take()]
    return {
        name: (waits, [record.sample_size, record.skipped, record.skipped_ranks, dict(record.metrics)])
        for name, (waits, record) in found.items()
    } | {"told": ({}, told), "bias": ({}, bias_grad)}


def test_numbers_on_a_device_cost_one_wait_in_all_and_a_report_three() -> None:
    """Checks(nonfinite="raise"), metrics and a sample_size on the device waited three times, and a report 14 times."""
    values = [6, False, (), {"loss": 3.0}]
    expected = {  # waits of rank 0, of rank 1; the result
        "device values, warn": (1, 1, values),
        "device values, raise": (1, 1, values),
        "device values, skip": (1, 1, values),
        "a report of skip": (1, 3, [None, True, (0, 1), {}]),
        "a part of no items": (1, 1, [4, False, (0,), {}]),
        "cleared in place": (2, 2, [None, False, (), {}]),
        "cleared in place, with items": (3, 3, [8, False, (), {}]),  # also: is any of them an earlier result?
        "no items, and a gradient that cannot be used": (1, 3, [4, False, (0,), {}]),
    }

    found = run_ranks(_counts_waits, 2, fresh=True)

    for rank, of_rank in enumerate(found):
        assert of_rank.pop("bias")[1] == [1.0, 1.0]  # the mean over the 4 items of rank 1, for the sum as the loss
        assert of_rank.pop("told")[1] == [
            "all_reduce() call 2: non-finite gradients, found before they were exchanged:"
        ]
        for name, (waits, result) in of_rank.items():
            assert (sum(waits.values()), result) == (expected[name][rank], expected[name][2]), (name, rank, waits)
    assert [*found[0]] == [*expected]


def _trains_with_tools(rank: int, folder: str) -> dict[str, list[list[int]]]:
    """By tool and optimizer: the waits in forward and backward, call, and step, of every step of the optimizer."""
    group, found = new_group(), {}
    for kind in (torch.optim.SGD, torch.optim.Adam):
        model = wrap_on_device(group, nn.BatchNorm1d(4), checks="detail")
        found[f"detail, {kind.__name__}"] = _count_by_phase(model, kind(model.parameters()), rank)
        model = wrap_on_device(group, nn.BatchNorm1d(4))
        optimizer = kind(model.parameters())
        with Recorder(model, f"{folder}/{kind.__name__}", optimizer=optimizer):
            found[f"recorder, {kind.__name__}"] = _count_by_phase(model, optimizer, rank)
    return found


def _count_by_phase(
    model: LegacyDistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int
) -> list[list[int]]:
    phases: tuple[Callable[[], Any], ...] = (lambda: backward_on_device(model, rank), model.all_reduce, optimizer.step)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        _waits()
        counts = []
        for run in phases:
            run()
            counts.append(_waits().total())
        found.append(counts)
    return found[1:]  # the first step finds buffers that are statistics


def test_detail_waits_once_in_a_step_and_a_recorder_twice(tmp_path: Path) -> None:
    """They waited five to seven times: once for each phase, and again for norms of zero and for state of an optimizer.

    The statistics of the batch norm are zero at first, and so is a gradient: all items of a batch are equal.
    """
    for found in run_ranks(_trains_with_tools, 2, str(tmp_path), fresh=True):
        assert found == {
            "detail, SGD": [[0, 1, 0]] * (STEPS - 1),
            "recorder, SGD": [[0, 1, 1]] * (STEPS - 1),
            "detail, Adam": [[0, 1, 0]] * (STEPS - 1),
            "recorder, Adam": [[0, 1, 1]] * (STEPS - 1),
        }


def _values() -> list[torch.Tensor]:
    large = torch.linspace(-3, 5, 3 * 2**14 + 5, device="cpu")
    large[[5, 2**14]] = math.nan
    return [
        torch.tensor([3.0, 4.0], device="cpu"),
        torch.tensor([3.0, math.nan, math.inf, 4.0], device="cpu"),
        torch.full((4,), 2.0**-140, device="cpu"),
        torch.full((4,), 2.0**127, device="cpu"),
        torch.zeros(3, device="cpu"),
        torch.empty(0, 3, device="cpu"),
        torch.tensor([3, 4], device="cpu"),
        torch.full((2, 2), 60_000.0, dtype=torch.float16, device="cpu"),
        large,
    ]


def _measures_values(_: int) -> tuple[list[list[Measured]], list[int]]:
    """What is told of the values that are overwritten before they are read; the waits, with and without doubles."""
    new_group()
    found: list[list[Measured]] = []
    waits = []
    for has_float64 in (True, False):
        device.has_float64 = has_float64
        devices.has_float64.cache_clear()
        tensors, reader = [value.to("sim") for value in _values()], devices.Reader()
        begin_measure(tensors, reader, found.append)
        for tensor in tensors:
            tensor.fill_(7)
        _waits()
        reader.read()
        waits.append(_waits().total())
    return found, waits


def test_numbers_that_are_read_later_are_those_of_the_values_at_first() -> None:
    """Also where a norm needs a second look on the CPU: zeros, NaN, and squares beyond fp32."""
    expected: list[Measured] = []
    reader = devices.Reader()
    begin_measure(_values(), reader, expected.extend)
    reader.read()

    (found, waits), _ = run_ranks(_measures_values, 2, fresh=True)

    assert waits == [1, 1]
    for measured in found:
        assert [(word, count) for word, _, count in measured] == [(word, count) for word, _, count in expected]
        norms = [norm for _, norm, _ in expected]
        assert [norm for _, norm, _ in measured] == [pytest.approx(norm, rel=1e-6) for norm in norms]
