"""Real trainings that lost a part of their state in a resume, or took other steps, against the straight run."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp.debug import Recorder
from tests.helpers.command import command, compare
from tests.helpers.ranks import run_ranks

STEPS, SAVED = 6, 3
LR = "lr of parameter group 0"
# Of a run: the first step, the parts of the checkpoint that are lost, and the step that is left out.
RUNS: dict[str, dict[str, Any]] = {
    "straight": {"saves": True},
    "resumed": {"first_step": SAVED + 1},
    "without optimizer": {"first_step": SAVED + 1, "lost": ("optimizer",)},
    "without scheduler": {"first_step": SAVED + 1, "lost": ("scheduler",)},
    "without both": {"first_step": SAVED + 1, "lost": ("optimizer", "scheduler")},
    "a step left out": {"left_out": 4},
    "one by one, and another rate from step 5": {"foreach": False, "rate_from_5": 0.5},
}
_saved: dict[str, Any] = {}  # the checkpoint of the straight run in this process


def _train(
    rank: int,
    folder: Path,
    *,
    first_step: int = 1,
    lost: tuple[str, ...] = (),
    left_out: int = 0,
    foreach: bool = True,
    rate_from_5: float = 0.0,
    saves: bool = False,
) -> None:
    """Linear layers on data that follow from step and rank. A step has the rate 0.1 * 0.9 ** (steps before)."""
    torch.manual_seed(0)
    model = LegacyDistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    if first_step > 1:
        state = copy.deepcopy(_saved)
        model.module.load_state_dict(state["model"])
        if "optimizer" in lost:
            state["optimizer"]["state"] = {}
        optimizer.load_state_dict(state["optimizer"])
        if "scheduler" not in lost:
            scheduler.load_state_dict(state["scheduler"])
        else:  # as of a new scheduler
            optimizer.param_groups[0]["lr"] = 0.1
    with Recorder(model, folder, optimizer=optimizer, first_step=first_step):
        for step in range(first_step, STEPS + 1):
            data = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))
            if rate_from_5 and step >= 5:
                optimizer.param_groups[0]["lr"] = rate_from_5
            model(data).square().mean().backward()
            model.all_reduce()
            if step != left_out:
                optimizer.step()
                scheduler.step()
            optimizer.zero_grad()
            if saves and step == SAVED:
                parts = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler}
                _saved.update({name: copy.deepcopy(part.state_dict()) for name, part in parts.items()})


def _train_all(rank: int, folder: Path) -> None:
    for name, changes in RUNS.items():
        _train(rank, folder / name, **changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(partial(_train_all, folder=folder), 2)
    return folder


def test_a_resumed_run_is_the_same_without_a_word_about_settings(runs: Path) -> None:
    found = compare(runs / "straight", runs / "resumed")

    assert (found.verdict, found.steps) == ("same", (SAVED, STEPS))
    assert found.notes == ("A begins with step 0",)


@pytest.mark.parametrize(
    "lost, step, phase, advice, causes",
    [
        ("optimizer", SAVED, "optimizer", "was the optimizer's state left out of a checkpoint", []),
        ("scheduler", SAVED + 1, "settings", "was the state of a scheduler left out of a checkpoint", []),
        ("both", SAVED, "optimizer", f"In the next compared step settings differ, too: {LR}.", [(LR, "from step 4")]),
    ],
)
def test_a_resumed_run_that_lost_a_part_of_its_state_names_it(
    runs: Path, lost: str, step: int, phase: str, advice: str, causes: list[tuple[str, str]]
) -> None:
    for order in (("straight", f"without {lost}"), (f"without {lost}", "straight")):
        found = compare(*(runs / name for name in order))
        text = command("diff", *(runs / name for name in order)).stdout

        assert (found.first.step, found.first.phase, found.first.ranks) == (step, phase, (0, 1))
        assert phase != "settings" or found.first.name == LR
        assert [(cause.what, cause.where) for cause in found.causes] == causes
        assert advice in found.meaning
        assert advice in " ".join(text.split())
        assert "betas" not in text


def test_a_step_that_one_run_left_out_is_named(runs: Path) -> None:
    found = compare(runs / "straight", runs / "a step left out")

    assert (found.first.step, found.first.phase) == (4, "optimizer")
    assert [(cause.what, cause.where, cause.sides) for cause in found.causes] == [
        ("step of the optimizer", "first in step 4", (("A", "taken"), ("B", "not taken")))
    ]
    assert "The step of the optimizer was taken in A and not taken in B." in found.meaning
    assert "nothing" not in command("diff", runs / "straight", runs / "a step left out").stdout


def test_an_implementation_of_the_step_does_not_hide_another_rate(runs: Path) -> None:
    found = compare(runs / "straight", runs / "one by one, and another rate from step 5")

    assert (found.first.step, found.first.phase, found.first.name) == (5, "settings", LR)
    assert [(cause.what, cause.where) for cause in found.settings_apart] == [
        ("foreach of parameter group 0", "from step 1")
    ]
