"""Does the benchmark of operations count them and their bytes? Nothing here looks at a time."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.ranks import run_ranks

sys.path.append(str(ROOT / "benchmarks"))  # Python puts a script's folder there
bench_operations = importlib.import_module("bench_operations")


def _run(rank: int, *given: str) -> None:
    bench_operations.run(bench_operations.parse_arguments(given))


@pytest.mark.thorough
def test_each_model_has_the_time_and_the_bytes_of_its_operations(tmp_path: Path) -> None:
    path = tmp_path / "operations.json"

    run_ranks(_run, 1, "--repeats", "1", "--rounds", "2", "--warm-up", "0", "--json", str(path), timeout_seconds=120)
    results = json.loads(path.read_text())["results"]

    assert list(results) == ["step of transformer encoder, 1 ranks", "step of train_lm, 1 ranks"]
    assert [result["operations"] for result in results.values()] == [371, 3007]
    assert [result["aims"] for result in results.values()] == [{"with operations": 8.0}, {"with operations": 20.0}]
    for result in results.values():
        assert list(result["variants"]) == ["plain", "plain again", "recorder", "with operations"]
        assert {row["n"] for row in result["variants"].values()} == {2}
        assert result["verdicts"]["with operations"] in ("met", "missed")
        assert 16 * result["operations"] < result["step_bytes"] < 50 * result["operations"]
        assert result["once_bytes"] > 10_000
