"""Do the benchmarks start, and is their arithmetic right? Nothing here looks at a time."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import thorough_but

BENCHMARKS = ROOT / "benchmarks"

sys.path.append(str(BENCHMARKS))  # the scripts find their neighbours because Python puts a script's folder there
_scaling = importlib.import_module("_scaling")
bench_agree = importlib.import_module("bench_agree")
bench_debug = importlib.import_module("bench_debug")
bench_trace = importlib.import_module("bench_trace")

SHORT = ("--repeats", "2", "--rounds", "1", "--warm-up", "1")


def _run_agree(rank: int, *given: str) -> None:
    bench_agree.run(bench_agree.parse_arguments(given))


def test_step_writes_the_control_and_a_verdict_per_update_freq(tmp_path: Path) -> None:
    path = tmp_path / "step.json"

    run_ranks(_run_agree, 2, "step", "--layers", "1", "--update-freq", "1", "4", *SHORT, "--json", str(path))
    results = json.loads(path.read_text())["results"]

    assert [result["aim"] for result in results.values()] == [1.05, 1.03]
    for result in results.values():
        assert list(result["variants"]) == ["off", "off again", "info"]
        assert {row["n"] for row in result["variants"].values()} == {2}
        assert result["verdict"] in ("met", "missed", "not decided")


@pytest.mark.thorough
def test_header_measures_every_power_of_two_up_to_the_ranks_there_are(tmp_path: Path) -> None:
    path = tmp_path / "header.json"

    run_ranks(_run_agree, 4, "header", *SHORT, "--json", str(path))
    document = json.loads(path.read_text())

    assert document["environment"]["world_size"] == 4
    assert list(document["results"]["run"]) == ["2", "4"]
    assert list(document["results"]["run"]["4"]) == ["barrier", "all_gather", "agree()"]
    assert document["results"]["reasoned"][0]["all_gather"]["most_ranks"] == 180


def _run_debug(rank: int, *given: str) -> None:
    bench_debug.run(bench_debug.parse_arguments(given))


@pytest.mark.thorough
def test_debug_tells_what_looking_after_replicas_adds_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "step.json"

    run_ranks(_run_debug, 2, "step", *SHORT, "--json", str(path))
    results = json.loads(path.read_text())["results"]

    assert list(results) == ["step of train_lm, 2 ranks", "step of 1,000 small tensors, 2 ranks"]
    aims = [{"detail": 1.25, "check every 10 steps": 1.05}] * 2
    aims[0] = {**aims[0], "record every step": 1.30, "record every 10 steps": 1.05}
    assert [result["aims"] for result in results.values()] == aims
    for result in results.values():
        variants = ["off", "off again", "info", "detail", "check every step", "record every step"]
        assert list(result["variants"]) == variants
        assert result["ratios"]["record every step"] == result["variants"]["record every step"]["median_ratio"]
        for what in ("check", "record"):
            each = result["variants"][f"{what} every step"]["median_ratio"]
            assert result["ratios"][f"{what} every 10 steps"] == pytest.approx(0.9 + each / 10)


@pytest.mark.thorough
def test_debug_tells_how_fast_a_digest_is(tmp_path: Path) -> None:
    path = tmp_path / "digest.json"

    run_ranks(_run_debug, 1, "digest", *SHORT, "--max-bytes", "65536", "--json", str(path))
    results = json.loads(path.read_text())["results"]

    assert list(results) == ["4 KiB", "64 KiB", "1,000 x 9 KiB"]
    for result in results.values():
        assert list(result) == ["copy", "digest"]


@pytest.mark.thorough
def test_trace_tells_seconds_and_memory_of_every_way_to_compare(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    bench_trace.main(["--steps", "12", "--parameters", "3", "--repeats", "1", "--json", str(path)])
    (ways,) = json.loads(path.read_text())["results"].values()

    assert list(ways) == ["equal", "different", "ranks of one"]
    assert all(way["peak_megabytes"] > 10 and way["median_seconds"] > 0 for way in ways.values())
    assert ways["equal"]["megabytes"] == pytest.approx(2 * ways["ranks of one"]["megabytes"])


@pytest.mark.parametrize(
    "given,said",
    [
        (["--repeats", "0"], "--repeats is a count: got 0, expected 1 or more"),
        (["--parameters", "0"], "--parameters is a count: got 0, expected 1 or more"),
        (["--steps", "250", "0"], "--steps are too few to differ: got 0, expected 10 or more"),
        (["--json", "no/such/folder/trace.json"], "nowhere to go: got no/such/folder/trace.json"),
    ],
)
def test_wrong_arguments_of_trace_are_named(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_trace.parse_arguments(given)

    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "script", thorough_but(["bench_step.py"], sorted(path.name for path in BENCHMARKS.glob("bench_*.py")))
)
def test_a_benchmark_started_as_a_script_finds_its_neighbours_and_its_own_package(script: str, tmp_path: Path) -> None:
    (tmp_path / "legacy_ddp.py").write_text("raise RuntimeError('the package of another checkout')")
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )

    assert (run.returncode, run.stderr) == (0, "")
    assert "--json" in run.stdout


def test_a_ring_takes_a_hop_per_other_rank_and_doubling_one_per_power_of_two() -> None:
    assert [_scaling.ring_hops(size) for size in (1, 2, 5, 16)] == [0, 1, 4, 15]
    assert [_scaling.doubling_hops(size) for size in (1, 2, 5, 16, 17)] == [0, 1, 3, 4, 5]


def test_the_fitted_alpha_is_the_one_that_made_the_times() -> None:
    assert _scaling.fit_alpha(_scaling.ring_hops, {2: 0.5, 4: 1.5, 16: 7.5}) == 0.5


def test_the_most_ranks_are_those_whose_hops_and_bytes_just_fit() -> None:
    network = _scaling.Network("by hand", alpha_seconds=2.0, beta_seconds=1 / 128)  # 3 s for each other rank

    found = _scaling.limits(network, row_seconds=1.0, limit_seconds=30.0, sizes=[4])

    assert found["all_gather"] == {
        "exchange_ms": {"4": 9000.0},
        "most_ranks": 11,  # 10 x 3 = 30
        "most_ranks_with_reading": 8,  # 7 x 3 + 8 = 29
    }
    assert found["recursive_doubling"] == {
        "exchange_ms": {"4": 7000.0},
        "most_ranks": 21,  # 5 x 2 + 20 = 30
        "most_ranks_with_reading": 11,  # 4 x 2 + 10 + 11 = 29
    }


@pytest.mark.parametrize("count,low,high", [(2, 0, 1), (5, 0, 4), (6, 0, 5), (10, 1, 8), (40, 13, 26)])
def test_the_interval_of_the_median_is_that_of_the_sign_test(count: int, low: int, high: int) -> None:
    # The tables' 95 % order statistics, counted from 0.
    assert bench_agree.median_interval(range(count)) == (low, high)


@pytest.mark.parametrize(
    "info,control,said",
    [
        ((0.99, 1.04), (0.98, 1.02), "met"),
        ((1.01, 1.06), (0.98, 1.02), "not decided"),
        ((1.06, 1.09), (0.98, 1.02), "missed"),
        ((1.06, 1.59), (0.77, 1.15), "not decided"),  # two equal variants differed as much
    ],
)
def test_an_aim_is_missed_only_beyond_what_two_equal_variants_differ_by(
    info: tuple[float, float], control: tuple[float, float], said: str
) -> None:
    assert bench_agree.verdict(info, control, 1.05) == said
