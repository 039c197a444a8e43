"""Comparison of two real trainings with one difference: step, phase, parameter and explanation."""

import os
import signal
import subprocess
from contextlib import suppress
from functools import partial
from os import sched_yield
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, PeerLostError
from legacy_ddp.debug import Recorder
from tests.helpers.command import compare
from tests.helpers.ranks import run_ranks
from tests.helpers.recorded import Recorded
from tests.helpers.scripts import fork_script

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


def _run(folder: Path, **changes: Any) -> Path:
    run_ranks(partial(_train, folder=folder, **changes), 2)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(tmp_path_factory.mktemp("original") / "trace")


def _compare(original: Path, tmp_path: Path, **changes: Any) -> Any:
    return compare(original, _run(tmp_path / "other", **changes))


def _place(comparison: Any) -> tuple[int, str, str, tuple[int, ...]]:
    first = comparison.first
    assert first is not None
    return first.step, first.phase, first.name, first.ranks


def test_an_identical_rerun_is_the_same(original: Path, tmp_path: Path) -> None:
    comparison = _compare(original, tmp_path)

    assert (comparison.verdict, comparison.steps, comparison.causes) == ("same", (0, STEPS), ())


def test_another_seed_shows_at_the_start(original: Path, tmp_path: Path) -> None:
    comparison = _compare(original, tmp_path, seed=1)

    assert _place(comparison) == (0, "parameters", "parameter '0.bias'", (0, 1))
    assert "seed" in [cause.what for cause in comparison.causes]


def test_one_initial_weight_shows_at_the_start_with_its_name(original: Path, tmp_path: Path) -> None:
    comparison = _compare(original, tmp_path, nudged=True)

    assert _place(comparison) == (0, "parameters", "parameter '3.weight'", (0, 1))
    assert comparison.others == ()


def test_another_number_of_threads_is_named_whatever_it_does(original: Path, tmp_path: Path) -> None:
    comparison = _compare(original, tmp_path, threads=2)

    found = [cause for cause in comparison.causes if cause.what == "threads"]
    if comparison.verdict == "same":  # so small a net is computed by one thread anyway
        assert any("threads" in note for note in comparison.notes)
    else:
        assert found[0].sides == (("A", "1"), ("B", "2"))


def test_another_order_of_batches_shows_in_the_step_in_which_it_is_read(original: Path, tmp_path: Path) -> None:
    comparison = _compare(original, tmp_path, swapped_at=4)

    step, phase, _, ranks = _place(comparison)
    assert (step, phase, ranks) == (4, "local_gradients", (0, 1))
    assert any("input" in cause.what or "data" in cause.what for cause in comparison.causes)
    # Python's own generator starts elsewhere in every process; torch's stand alike.
    assert not any("generators" in cause.what for cause in comparison.causes)


def test_another_micro_batch_shape_is_named_first(original: Path, tmp_path: Path) -> None:
    comparison = _compare(original, tmp_path, split=2)

    assert _place(comparison)[:2] == (1, "local_gradients")
    assert "shape" in comparison.causes[0].what


@pytest.mark.parametrize(
    "changes, step, name",
    [
        ({"lr": 0.02, "lr_from": 3}, 3, "lr of parameter group 0"),
        ({"weight_decay": 0.02}, 1, "weight_decay of parameter group 0"),
    ],
)
def test_one_hyperparameter_shows_by_name_in_the_step_that_uses_it(
    original: Path, tmp_path: Path, changes: dict[str, Any], step: int, name: str
) -> None:
    assert _place(_compare(original, tmp_path, **changes)) == (step, "settings", name, (0, 1))


def test_dropout_that_is_off_shows_in_the_first_local_gradients(original: Path, tmp_path: Path) -> None:
    assert _place(_compare(original, tmp_path, dropout=0.0))[:2] == (1, "local_gradients")


def test_another_clip_shows_in_the_state_of_the_optimizer(original: Path, tmp_path: Path) -> None:
    assert _place(_compare(original, tmp_path, clipped=1e-3))[:2] == (1, "optimizer")


def test_a_shorter_run_recorded_less_often_is_the_same_as_far_as_it_goes(original: Path, tmp_path: Path) -> None:
    comparison = _compare(original, tmp_path, every=2, steps=4)

    assert (comparison.verdict, comparison.steps) == ("same", (0, 4))
    assert any("6" in note for note in comparison.notes)


def test_a_weight_written_on_one_rank_shows_among_the_ranks_of_one_run(tmp_path: Path) -> None:
    """It is written after step 3 was recorded; step 4 starts from it, and its state still agrees."""
    comparison = compare(_run(tmp_path / "trace", written_on=1))

    step, phase, name, ranks = _place(comparison)
    assert (step, phase, name) == (4, "parameters", "parameter '0.bias'")
    assert ranks == (0, 1)  # two ranks: no majority


def test_the_ranks_of_a_good_run_are_the_same(original: Path) -> None:
    assert compare(original).verdict == "same"


def _diff(*arguments: str) -> subprocess.CompletedProcess[str]:
    return fork_script("-m", "legacy_ddp", "diff", *arguments)


def test_the_command_answers_with_its_exit_status(original: Path, tmp_path: Path) -> None:
    other = _run(tmp_path / "other", lr=0.02)

    same, different, unknown = (
        _diff(str(original), str(original)),
        _diff(str(original), str(other)),
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
