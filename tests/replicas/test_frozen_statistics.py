"""Statistics of frozen layers are compared, statistics of each rank's own data are not; and how a report reads them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, ReplicaDivergenceError
from tests.helpers import logged_warnings
from tests.helpers.default_trainings import names_in, told_late
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import once

STEPS = 22
FAULT = 6  # the step after which a rank writes; a digest of the buffers is in every call of so small a model


class _Frozen(nn.Module):
    """A normalisation with constant statistics of its own class, as object detectors have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.running_mean


Act = Callable[[nn.Module, int, int], object]  # what a rank does before a step: module, rank, step


def _nothing(module: nn.Module, rank: int, step: int) -> None:
    pass


def _freeze(module: nn.Module, rank: int, step: int) -> None:
    module[1].eval()


def _freeze_all(module: nn.Module, rank: int, step: int) -> None:
    module.eval()


def _stop_momentum(module: nn.Module, rank: int, step: int) -> None:
    module[1].momentum = 0.0


def _stop_tracking(module: nn.Module, rank: int, step: int) -> None:
    module[1].track_running_stats = False


def _freeze_on_rank_0(module: nn.Module, rank: int, step: int) -> None:
    module[1].train(rank != 0)


def _freeze_after_warm_up(module: nn.Module, rank: int, step: int) -> None:
    module[1].train(step < 4)


def _stop_momentum_after_warm_up(module: nn.Module, rank: int, step: int) -> None:
    module[1].momentum = 0.1 if step < 4 else 0.0


def _evaluate_between(module: nn.Module, rank: int, step: int) -> None:
    module.eval()
    with torch.no_grad():
        module(torch.randn(3, 4, 4))
    module.train()


def _load_on_all(module: nn.Module, rank: int, step: int) -> None:
    """A checkpoint after wrapping, equal on all ranks; the layer is frozen."""
    module[1].eval()
    if step == 1:
        module[1].running_mean.fill_(0.5)


def _load_statistics_of_each_rank(module: nn.Module, rank: int, step: int) -> None:
    if step == 1:
        module[1].running_mean.fill_(float(rank))


@dataclass(frozen=True)
class Case:
    """``act``: what every rank does before its steps. ``layer``: the layer with statistics. ``is_inside``: whether the
    forward is of the module inside, which the wrapper does not see.
    """

    act: Act
    layer: Callable[[], nn.Module] = field(default=lambda: nn.BatchNorm1d(4))
    is_inside: bool = False


FROZEN = {
    "evaluation mode": Case(_freeze),
    "the whole model in evaluation mode": Case(_freeze_all),
    "a forward of the module inside": Case(_freeze, is_inside=True),
    "momentum 0": Case(_stop_momentum),
    "no tracking": Case(_stop_tracking),
    "SyncBatchNorm": Case(_freeze, lambda: nn.SyncBatchNorm(4)),
    "InstanceNorm": Case(_freeze, lambda: nn.InstanceNorm1d(4, track_running_stats=True)),
    "a class of the user": Case(_nothing, _Frozen),
    "a checkpoint after wrapping": Case(_load_on_all),
}
OWN = {
    "training": Case(_nothing),
    "evaluation between": Case(_evaluate_between),
    "frozen after a warm-up": Case(_freeze_after_warm_up),
    "momentum 0 after a warm-up": Case(_stop_momentum_after_warm_up),
    "frozen on one rank": Case(_freeze_on_rank_0),
    "cumulative averages": Case(_nothing, lambda: nn.BatchNorm1d(4, momentum=None)),
    "InstanceNorm in training": Case(_nothing, lambda: nn.InstanceNorm1d(4, track_running_stats=True)),
    "statistics of each rank loaded": Case(_load_statistics_of_each_rank),
}
LEVELS: dict[str, Any] = {"info": "info", "detail": "detail", "every": Checks("detail", every=3)}
Told = tuple[int, str]  # the call that tells, and the text


def _write(module: nn.Module) -> None:
    module[1].running_mean[2] = 7.0


def _train(rank: int, case: Case, checks: Any, writer: int | None) -> Told:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 4), case.layer(), nn.Linear(4, 1))
    model = LegacyDistributedDataParallel(module, checks=checks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    logged_warnings.take()
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            case.act(module, rank, step)
        (module if case.is_inside else model)(torch.randn(3, 4, 4)).square().mean().backward()
        try:
            model.all_reduce()
        except ReplicaDivergenceError as error:
            return step, str(error)
        if told := logged_warnings.take():
            return step, told[0]
        optimizer.step()
        optimizer.zero_grad()
        if step == FAULT and rank == writer:
            with torch.no_grad():
                _write(module)
    return 0, ""


def _train_all(rank: int, name: str, writer: int | None) -> dict[tuple[str, str], Told]:
    cases = FROZEN if name == "FROZEN" else OWN
    return {
        (level, key): _train(rank, case, checks, writer)
        for level, checks in LEVELS.items()
        for key, case in cases.items()
    }


@once
def _told(world_size: int, name: str, writer: int | None) -> list[dict[tuple[str, str], Told]]:
    return run_ranks(_train_all, world_size, name, writer, timeout_seconds=240)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FROZEN)
def test_frozen_statistics_written_on_one_rank_are_told_on_all(name: str, level: str) -> None:
    of_ranks = [of_rank[level, name] for of_rank in _told(3, "FROZEN", 1)]
    call, text = of_ranks[0]
    unwrapped = " ".join(text.split())

    assert of_ranks == [of_ranks[0]] * 3
    within = {"info": 1 + told_late(), "detail": 1, "every": 3}
    assert FAULT < call <= FAULT + within[level], text
    assert names_in(text) == {"1.running_mean"}
    assert "rank 1 against ranks 0, 2" in unwrapped
    assert "ranks 0, 2 agree in buffer '1.running_mean': a write" in unwrapped or level != "detail"
    assert "local_buffers" not in text


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [*FROZEN, *OWN])
def test_statistics_that_no_rank_writes_are_silent(name: str, level: str) -> None:
    table = "FROZEN" if name in FROZEN else "OWN"

    assert [of_rank[level, name] for of_rank in _told(3, table, None)] == [(0, "")] * 3


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["training", "frozen after a warm-up", "frozen on one rank"])
def test_statistics_of_each_rank_may_be_written(name: str, level: str) -> None:
    assert [of_rank[level, name] for of_rank in _told(2, "OWN", 1)] == [(0, "")] * 2
