"""Does the benchmark of the digests' share take all of their time, and count right? Nothing here looks at a time."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.paths import ROOT
from tests.helpers.ranks import run_ranks

sys.path.append(
    str(ROOT / "benchmarks")
)  # the scripts find their neighbours because Python puts a script's folder there
bench_digest = importlib.import_module("bench_digest")

SHORT = ("--layers", "1", "--repeats", "2", "--rounds", "2", "--warm-up", "1")


def _run(rank: int, *given: str) -> None:
    bench_digest.run(bench_digest.parse_arguments(given))


@pytest.mark.thorough
def test_each_model_has_the_share_of_its_digests(tmp_path: Path) -> None:
    path = tmp_path / "digest.json"

    run_ranks(_run, 2, *SHORT, "--json", str(path), timeout_seconds=120)
    results = json.loads(path.read_text())["results"]

    models = ["train_lm", "1,000 small tensors", "transformer"]
    assert list(results) == [f"step of {name}, 2 ranks" for name in models]
    for row in results.values():
        assert row["n"] == 4  # of 6 steps with digests, without the warm-up
        assert 0 < row["digest_ms"] < row["step_ms"]
        assert row["share"] == pytest.approx(row["digest_ms"] / row["step_ms"])
        low, high = row["longer_95"]
        assert low <= row["longer"] <= high
        assert row["verdict"] == ("met" if row["longer"] <= 0.01 else "missed")


@pytest.mark.usefixtures("alone")
def test_steps_without_digests_take_none_and_steps_with_digests_take_one() -> None:
    model = LegacyDistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    digests = model._synchronizer.digests
    taken: list[int] = []
    take = digests._digest
    digests._digest = lambda number: (taken.append(number), take(number))[1]
    watch = bench_digest._Stopwatch(digests)

    for step in range(1, 9):
        watch.is_on = step in (2, 5, 6)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        model.all_reduce()
        optimizer.step()

    assert taken == [2, 5, 6]


@pytest.mark.usefixtures("alone")
def test_every_method_of_the_digests_that_runs_in_a_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LegacyDistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    digests = model._synchronizer.digests
    watch = bench_digest._Stopwatch(digests)
    ticks = iter(range(10_000))
    monkeypatch.setattr(bench_digest.time, "perf_counter", lambda: float(next(ticks)))

    model(torch.ones(1, 2)).sum().backward()
    after_forward = watch.seconds
    model.all_reduce()
    after_call = watch.seconds
    optimizer.step()

    assert after_forward > 0
    assert after_call > after_forward
    assert watch.seconds > after_call
