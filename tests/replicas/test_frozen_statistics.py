"""Statistics of frozen layers are compared, statistics of each rank's own data are not; and how a report reads them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks
from tests.helpers.default_trainings import EACH, Run, Told, names_in, told_late, train, unwrapped
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
    "the whole model in evaluation mode": Case(lambda module, *_: module.eval()),
    "a forward of the module inside": Case(_freeze, is_inside=True),
    "momentum 0": Case(lambda module, *_: setattr(module[1], "momentum", 0.0)),
    "no tracking": Case(lambda module, *_: setattr(module[1], "track_running_stats", False)),
    "SyncBatchNorm": Case(_freeze, lambda: nn.SyncBatchNorm(4)),
    "InstanceNorm": Case(_freeze, lambda: nn.InstanceNorm1d(4, track_running_stats=True)),
    "a class of the user": Case(_nothing, _Frozen),
    "a checkpoint after wrapping": Case(_load_on_all),
}
OWN = {
    "training": Case(_nothing),
    "evaluation between": Case(_evaluate_between),
    "frozen after a warm-up": Case(lambda module, _, step: module[1].train(step < 4)),
    "momentum 0 after a warm-up": Case(
        lambda module, _, step: setattr(module[1], "momentum", 0.1 if step < 4 else 0.0)
    ),
    "frozen on one rank": Case(lambda module, rank, _: module[1].train(rank != 0)),
    "cumulative averages": Case(_nothing, lambda: nn.BatchNorm1d(4, momentum=None)),
    "InstanceNorm in training": Case(_nothing, lambda: nn.InstanceNorm1d(4, track_running_stats=True)),
    "statistics of each rank loaded": Case(_load_statistics_of_each_rank),
}
LEVELS: dict[str, Any] = {"info": "info", "detail": "detail", "every": Checks("detail", every=3)}


class _Training(Run):
    """On batches of three dimensions, which every layer with statistics takes."""

    is_inside = False

    def backward(self) -> None:
        (self.module if self.is_inside else self.model)(torch.randn(3, 4, 4)).square().mean().backward()


def _train(rank: int, case: Case, checks: Any, writer: int | None) -> Told:
    torch.manual_seed(3)
    run = _Training(rank, nn.Sequential(nn.Linear(4, 4), case.layer(), nn.Linear(4, 1)), arguments={"checks": checks})
    run.is_inside = case.is_inside

    def act(run: Run) -> None:
        if run.step == FAULT and rank == writer:
            run.module[1].running_mean[2] = 7.0
        case.act(run.module, rank, run.step + 1)

    steps = STEPS if writer is None else FAULT + 3 + told_late()  # the last call that may tell
    return train(run, steps, {("wrapped", 0): act, ("stepped", EACH): act})


def _train_all(rank: int, names: Sequence[str], writer: int | None) -> dict[tuple[str, str], Told]:
    return {
        (level, name): _train(rank, (FROZEN | OWN)[name], checks, writer)
        for level, checks in LEVELS.items()
        for name in names
    }


@once
def _told(names: tuple[str, ...], writer: int | None) -> list[dict[tuple[str, str], Told]]:
    return run_ranks(_train_all, 3, names, writer, timeout_seconds=240)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FROZEN)
def test_frozen_statistics_written_on_one_rank_are_told_on_all(name: str, level: str) -> None:
    told, *others = (of_rank[level, name] for of_rank in _told((*FROZEN,), 1))
    call, text = told[0]

    assert others == [told] * 2
    within = {"info": 1 + told_late(), "detail": 1, "every": 3}
    assert FAULT < call <= FAULT + within[level], text
    assert names_in(text) == {"1.running_mean"}
    assert "rank 1 against ranks 0, 2" in unwrapped(text)
    assert "ranks 0, 2 agree in buffer '1.running_mean': a write" in unwrapped(text) or level != "detail"
    assert "local_buffers" not in text


@pytest.mark.unsimulated("each operation takes long there, and what is told runs there")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [*FROZEN, *OWN])
def test_statistics_that_no_rank_writes_are_silent(name: str, level: str) -> None:
    assert [of_rank[level, name] for of_rank in _told((*FROZEN, *OWN), None)] == [[]] * 3


WRITTEN = ("training", "frozen after a warm-up", "frozen on one rank")


@pytest.mark.unsimulated("each operation takes long there, and what is told runs there")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", WRITTEN)
def test_statistics_of_each_rank_may_be_written(name: str, level: str) -> None:
    assert [of_rank[level, name] for of_rank in _told(WRITTEN, 1)] == [[]] * 3
