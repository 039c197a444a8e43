"""Does the benchmark of narrower wires train what it says, and subtract seed by seed?"""

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.scripts import fork_script

sys.path.append(str(ROOT / "benchmarks"))
bench_wire = importlib.import_module("bench_wire")


def test_differences_are_taken_seed_by_seed() -> None:
    results = bench_wire.summarize({"their own": {"0": 2.0, "1": 3.0}, "bfloat16": {"0": 2.5, "1": 3.25}})

    assert results["their own"]["mean_difference"] == 0
    assert results["bfloat16"]["mean_difference"] == 0.375
    assert results["bfloat16"]["seed_spread"] == 0.75
    assert results["bfloat16"]["mean_bits"] == 2.875


@pytest.mark.thorough
def test_each_training_is_run_with_its_own_wire(tmp_path: Path) -> None:
    path = tmp_path / "wire.json"

    run = fork_script(
        str(ROOT / "benchmarks" / "bench_wire.py"),
        *("--seeds", "0", "--wires", "their own", "float16", "--steps", "3", "--json", str(path)),
        forks_children=True,
    )
    assert run.returncode == 0, run.stderr
    results = json.loads(path.read_text())["results"]

    assert list(results) == ["their own", "float16"]
    assert all(1 < row["bits_per_byte"]["0"] < 9 for row in results.values())


@pytest.mark.parametrize(
    "given,said",
    [
        (["--wires", "bfloat16"], "expected 'their own' among them"),
        (["--steps", "0"], "--steps is a count: got 0, expected 1 or more"),
        (["--json", "no/such/folder/wire.json"], "nowhere to go: got no/such/folder/wire.json"),
    ],
)
def test_wrong_arguments_are_named(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_wire.parse_arguments(given)

    assert said in capsys.readouterr().err
