"""Comparison of two real trainings with one difference: step, phase, parameter and explanation."""

import os
import signal
import subprocess
from contextlib import suppress
from os import sched_yield
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, PeerLostError
from legacy_ddp.debug import Recorder
from tests.helpers.command import compare
from tests.helpers.ranks import run_ranks
from tests.helpers.recorded import Recorded
from tests.helpers.scripts import fork_script
from tests.helpers.shared_jobs import once, run_cases

STEPS, BATCHES = 6, 3  # per step and rank


def _train(
    rank: int,
    folder: Path,
    *,
    seed: int = 0,
    nudged: bool = False,
    threads: int = 1,
    swapped_at: int = 0,
    lr: float = 0.01,
    lr_from: int = 1,
    weight_decay: float = 0.01,
    dropout: float = 0.2,
    split: int = 1,
    clipped: float = 10.0,
    written_on: int = -1,
    every: int = 1,
    steps: int = STEPS,
) -> None:
    """A small net on data that follow from step and rank."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = LegacyDistributedDataParallel(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)),
        checks=Checks(divergence="warn" if written_on < 0 else "ignore"),
    )
    if nudged:
        with torch.no_grad():
            model.module[3].weight[0, 5] += 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=weight_decay)
    torch.manual_seed(seed + 1 + rank)
    with Recorder(model, folder, optimizer=optimizer, every=every):
        for step in range(1, steps + 1):
            data = torch.randn(BATCHES, 4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
            order = [1, 0, 2] if step == swapped_at else [0, 1, 2]
            optimizer.zero_grad()
            for index in order:
                for part in data[index].chunk(split):
                    model(part).square().sum().backward()
            model.all_reduce(sample_size=4 * BATCHES)
            nn.utils.clip_grad_norm_(model.parameters(), clipped)
            for group in optimizer.param_groups:
                group["lr"] = lr if step >= lr_from else 0.01
            optimizer.step()
            if rank == written_on and step == 3:
                with torch.no_grad():
                    model.module[0].bias[1] += 1


class Case(NamedTuple):
    """Another training, and where the original parts from it. ``cause``: a part of the name of a cause."""

    changes: dict[str, Any]
    step: int
    phase: str
    name: str = ""
    cause: str = ""


CASES = {
    "another seed": Case({"seed": 1}, 0, "parameters", "parameter '0.bias'", "seed"),
    "one initial weight": Case({"nudged": True}, 0, "parameters", "parameter '3.weight'"),
    "another order of batches": Case({"swapped_at": 4}, 4, "local_gradients", cause="data"),
    "another micro-batch shape": Case({"split": 2}, 1, "local_gradients", cause="shape"),
    "another rate": Case({"lr": 0.02, "lr_from": 3}, 3, "settings", "lr of parameter group 0"),
    "another decay": Case({"weight_decay": 0.02}, 1, "settings", "weight_decay of parameter group 0"),
    "dropout that is off": Case({"dropout": 0.0}, 1, "local_gradients"),
    "another clip": Case({"clipped": 1e-3}, 1, "optimizer"),
}
OTHERS: dict[str, dict[str, Any]] = {
    "original": {},
    "rerun": {},
    "another number of threads": {"threads": 2},
    "a shorter run recorded less often": {"every": 2, "steps": 4},
    "a weight written on one rank": {"written_on": 1},
}


def _train_case(rank: int, folder: Path, changes: dict[str, Any]) -> None:
    _train(rank, folder, **changes)


@once
def _runs(base: Path) -> Path:
    folder = Path(mkdtemp(dir=base))
    changes = OTHERS | {name: case.changes for name, case in CASES.items()}
    run_cases(_train_case, 2, {name: (folder / name, of_run) for name, of_run in changes.items()})
    return folder


@pytest.fixture
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _runs(tmp_path_factory.getbasetemp())


@pytest.fixture
def original(runs: Path) -> Path:
    return runs / "original"


@pytest.mark.parametrize("name", CASES)
def test_a_difference_shows_where_training_first_feels_it(runs: Path, original: Path, name: str) -> None:
    case = CASES[name]

    found = compare(original, runs / name)

    assert (found.first.step, found.first.phase, found.first.ranks) == (case.step, case.phase, (0, 1))
    assert case.name in ("", found.first.name)
    assert not case.cause or case.cause in found.causes[0].what
    # Python's own generator starts elsewhere in every process; torch's stand alike.
    assert name == "dropout that is off" or not any("generators" in cause.what for cause in found.causes)
    assert name != "one initial weight" or found.others == ()


def test_an_identical_rerun_is_the_same(runs: Path, original: Path) -> None:
    found = compare(original, runs / "rerun")

    assert (found.verdict, found.steps, found.causes) == ("same", (0, STEPS), ())


def test_another_number_of_threads_is_named_whatever_it_does(runs: Path, original: Path) -> None:
    comparison = compare(original, runs / "another number of threads")

    found = [cause for cause in comparison.causes if cause.what == "threads"]
    if comparison.verdict == "same":  # so small a net is computed by one thread anyway
        assert any("threads" in note for note in comparison.notes)
    else:
        assert found[0].sides == (("A", "1"), ("B", "2"))


def test_a_shorter_run_recorded_less_often_is_the_same_as_far_as_it_goes(runs: Path, original: Path) -> None:
    comparison = compare(original, runs / "a shorter run recorded less often")

    assert (comparison.verdict, comparison.steps) == ("same", (0, 4))
    assert any("6" in note for note in comparison.notes)


def test_a_weight_written_on_one_rank_shows_among_the_ranks_of_one_run(runs: Path) -> None:
    """It is written after step 3 was recorded; step 4 starts from it, and its state still agrees."""
    first = compare(runs / "a weight written on one rank").first

    assert (first.step, first.phase, first.name) == (4, "parameters", "parameter '0.bias'")
    assert first.ranks == (0, 1)  # two ranks: no majority


def test_the_ranks_of_a_good_run_are_the_same(original: Path) -> None:
    assert compare(original).verdict == "same"


def _diff(*arguments: str) -> subprocess.CompletedProcess[str]:
    return fork_script("-m", "legacy_ddp", "diff", *arguments)


def test_the_command_answers_with_its_exit_status(runs: Path, original: Path, tmp_path: Path) -> None:
    same, different, unknown = (
        _diff(str(original), str(original)),
        _diff(str(original), str(runs / "another rate")),
        _diff(str(original), str(tmp_path / "none")),
    )

    assert [run.returncode for run in (same, different, unknown)] == [0, 1, 2]
    assert "lr of parameter group 0" in different.stdout
    assert max(map(len, different.stdout.splitlines())) <= 80
    assert unknown.stdout == ""
    assert len(unknown.stderr.splitlines()) == 1


def _train_until_killed(rank: int, folder: Path, size_bytes: int) -> None:
    if rank == 1:
        Thread(target=_kill_at, args=(folder / "rank-00001.jsonl", size_bytes), daemon=True).start()
    with suppress(PeerLostError):  # which ends the recorder's block on the way
        _train(rank, folder, steps=10_000)


def _kill_at(path: Path, size_bytes: int) -> None:
    while not path.exists() or path.stat().st_size < size_bytes:
        sched_yield()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("size_bytes", Random(9).sample(range(2_000, 20_000), 2))
def test_a_run_killed_at_a_random_byte_is_the_same_as_far_as_it_got(
    original: Path, tmp_path: Path, size_bytes: int
) -> None:
    run_ranks(_train_until_killed, 2, tmp_path, size_bytes, lost={1})

    assert [Recorded(tmp_path, rank).end for rank in (0, 1)] == ["PeerLostError", ""]
    assert (tmp_path / "rank-00001.jsonl").stat().st_size >= size_bytes
    assert compare(original, tmp_path).verdict == "same"
    assert compare(tmp_path).verdict == "same"
