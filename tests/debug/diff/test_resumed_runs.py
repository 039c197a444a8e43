"""Real trainings with one difference, in the training or in the state after a resume, against the straight run."""

import copy
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp.debug import Recorder
from tests.helpers.command import command, compare
from tests.helpers.shared_jobs import once, run_cases

STEPS, SAVED = 6, 3
BATCHES = 3  # per step and rank
LR = "lr of parameter group 0"
_saved: dict[str, Any] = {}  # the checkpoint of the straight run in this process


class Change(NamedTuple):
    """A difference from the straight run. ``lost``: parts of the checkpoint of step ``SAVED``, from which it starts."""

    seed: int = 0
    swapped_at: int = 0
    dropout: float = 0.0
    split: int = 1
    clipped: float = 10.0
    written_on: int = -1
    left_out: int = 0
    lost: tuple[str, ...] | None = None


def _train(rank: int, folder: Path, change: Change) -> None:
    """A small net on data that follow from step and rank. A step has the rate 0.1 * 0.9 ** (steps before)."""
    torch.manual_seed(change.seed)
    model = LegacyDistributedDataParallel(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(change.dropout), nn.Linear(16, 1)),
        checks=Checks(divergence="warn" if change.written_on < 0 else "ignore"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    parts = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler}
    first = 1 if change.lost is None else SAVED + 1
    if change.lost is not None:
        _load(parts, change.lost)
    torch.manual_seed(change.seed + 1 + rank)
    with Recorder(model, folder, optimizer=optimizer, first_step=first):
        for step in range(first, STEPS + 1):
            for batch in _batches(rank, step, change):
                model(batch).square().sum().backward()
            model.all_reduce(sample_size=4 * BATCHES)
            nn.utils.clip_grad_norm_(model.parameters(), change.clipped)
            if step != change.left_out:
                optimizer.step()
                scheduler.step()
            optimizer.zero_grad()
            if rank == change.written_on and step == 3:
                with torch.no_grad():
                    model.module[0].bias[1] += 1
            if change == Change() and step == SAVED:
                _saved.update({name: copy.deepcopy(part.state_dict()) for name, part in parts.items()})


def _load(parts: dict[str, Any], lost: tuple[str, ...]) -> None:
    state = copy.deepcopy(_saved)
    if "optimizer" in lost:
        state["optimizer"]["state"] = {}
    for name, part in parts.items():
        if name not in lost or name == "optimizer":
            part.load_state_dict(state[name])
        else:  # as of a new scheduler
            parts["optimizer"].param_groups[0]["lr"] = 0.1


def _batches(rank: int, step: int, change: Change) -> list[torch.Tensor]:
    data = torch.randn(BATCHES, 4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    order = [0, 2, 1] if step == change.swapped_at else [0, 1, 2]
    return [part for index in order for part in data[index].chunk(change.split)]


class Case(NamedTuple):
    """Where the straight run parts from another training. ``cause``: a part of the name of a cause."""

    change: Change
    step: int
    phase: str
    name: str = ""
    cause: str = ""


CASES = {
    "another seed": Case(Change(seed=1), 0, "parameters", "parameter '0.bias'", "seed"),
    "another order of batches": Case(Change(swapped_at=4), 4, "local_gradients", cause="data"),
    "another micro-batch shape": Case(Change(split=2), 1, "local_gradients", cause="shape"),
    "dropout": Case(Change(dropout=0.2), 1, "local_gradients"),
    "another clip": Case(Change(clipped=1e-3), 1, "optimizer"),
}
OTHERS = {
    "straight": Change(),  # the first: the others resume from its checkpoint
    "rerun": Change(),
    "a weight written on one rank": Change(written_on=1),
    "resumed": Change(lost=()),
    "without optimizer": Change(lost=("optimizer",)),
    "without scheduler": Change(lost=("scheduler",)),
    "without both": Change(lost=("optimizer", "scheduler")),
    "a step left out": Change(left_out=4),
}


@once
def _runs(base: Path) -> Path:
    folder = Path(mkdtemp(dir=base))
    changes = OTHERS | {name: case.change for name, case in CASES.items()}
    run_cases(_train, 2, {name: (folder / name, change) for name, change in changes.items()})
    return folder


@pytest.fixture
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _runs(tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("name", CASES)
def test_a_difference_shows_where_training_first_feels_it(runs: Path, name: str) -> None:
    case = CASES[name]

    found = compare(runs / "straight", runs / name)

    assert (found.first.step, found.first.phase, found.first.ranks) == (case.step, case.phase, (0, 1))
    assert case.name in ("", found.first.name)
    assert not case.cause or case.cause in found.causes[0].what
    # Python's own generator starts elsewhere in every process; torch's stand alike.
    assert name == "dropout" or not any("generators" in cause.what for cause in found.causes)


def test_an_identical_rerun_and_the_ranks_of_one_run_are_the_same(runs: Path) -> None:
    found = compare(runs / "straight", runs / "rerun")

    assert (found.verdict, found.steps, found.causes) == ("same", (0, STEPS), ())
    assert compare(runs / "straight").verdict == "same"


def test_a_weight_written_on_one_rank_shows_among_the_ranks_of_one_run(runs: Path) -> None:
    """It is written after step 3 was recorded; step 4 starts from it, and its state still agrees."""
    first = compare(runs / "a weight written on one rank").first

    assert (first.step, first.phase, first.name) == (4, "parameters", "parameter '0.bias'")
    assert first.ranks == (0, 1)  # two ranks: no majority


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
