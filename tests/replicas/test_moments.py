"""The moments of a report: between what was compared last and what was found, whenever replicas parted."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, ReplicaDivergenceError
from tests.helpers import logged_warnings
from tests.helpers.shared_jobs import run_cases

_STEP = 5  # of the fault


class _Writing(nn.Linear):
    """Writes to its own weights in the next forward."""

    writes = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.writes = False
            with torch.no_grad():
                self.weight.add_(1.0)
        return super().forward(inputs)


def _report(rank: int, how: str, checks: Any) -> str:
    """The report of a training with a fault of rank 1."""
    torch.manual_seed(0)
    layer = _Writing(2, 1)
    model = LegacyDistributedDataParallel(layer, checks=checks)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.125)
    if how == "before a closure":
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.125, max_iter=1)
    for step in range(1, 2 * _STEP):
        is_faulty = rank == 1 and step == _STEP
        layer.writes = is_faulty and how in ("in a forward", "before a closure", "no step")
        inputs = torch.tensor([[1.0, rank + step]])
        _backward(model, inputs)
        if is_faulty and how == "a step in no_sync()":
            with model.no_sync():
                optimizer.step()
            optimizer.zero_grad()
            _backward(model, inputs)
        try:
            model.all_reduce()
        except ReplicaDivergenceError as error:
            return " ".join(str(error).split())
        if texts := logged_warnings.take():
            return " ".join(texts[0].split())
        if how == "before a closure":
            optimizer.step(partial(_nothing, model, inputs))
        elif step != _STEP or how != "no step":
            optimizer.step()
        if is_faulty and how == "a rate, and a scheduler":
            optimizer.param_groups[0]["lr"] = 0.25
        optimizer.zero_grad()
    return ""


def _nothing(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).sum() * 0
    return loss


def _backward(model: nn.Module, inputs: torch.Tensor) -> None:
    (model(inputs) - 1).square().mean().backward()


_FORWARD = "since: between the first forward after call 4 and"
_FOUND = {
    "in a forward": {
        "info": f"{_FORWARD} this call",
        "detail": f"{_FORWARD} the step() after call 5",
        "every": f"{_FORWARD} this call",
    },
    "a step in no_sync()": {
        "info": f"{_FORWARD} this call",
        "detail": f"{_FORWARD} the step() after call 5",
        "every": f"{_FORWARD} this call",
    },
    "no step": {"info": f"{_FORWARD} this call", "detail": f"{_FORWARD} this call"},
    "before a closure": {"detail": f"{_FORWARD} the end of the step() after call 5"},
}
_CHECKS: dict[str, Any] = {
    "info": Checks(unsynchronized_step="allow"),
    "detail": "detail",
    "every": Checks("detail", every=2),
}
_CASES = {f"{how}, {level}": (how, _CHECKS[level]) for how, of_levels in _FOUND.items() for level in of_levels}


@pytest.mark.cpu("a device tells it some calls later, and the report says so")
def test_a_write_in_or_after_the_forward_of_a_call_is_not_dated_after_the_call() -> None:
    found = run_cases(_report, 2, _CASES)

    for how, of_levels in _FOUND.items():
        for level, since in of_levels.items():
            first, second = found[f"{how}, {level}"]
            assert first == second
            assert f" {since} " in first, (how, level, first)


def test_the_entries_of_an_optimizer_are_shown_with_their_moment() -> None:
    cases = {level: ("a rate, and a scheduler", checks) for level, checks in _CHECKS.items()}
    note = (
        "note: optimizer state (`step`) is as of this call, and settings (`lr`) are as of the last step() before it; "
        "replicas may have parted earlier"
    )

    for level, (first, second) in run_cases(_report, 2, cases).items():
        assert first == second
        assert "lr of parameter group 0: rank 1 has 0.25; rank 0 has 0.125" in first, level
        assert note in first, level
