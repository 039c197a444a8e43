"""Does the benchmark of a warm call measure both checkouts, and count right? Nothing here looks at a time."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))  # Python puts a script's folder there
bench_warm_call = importlib.import_module("bench_warm_call")
worker = importlib.import_module("_warm_call_worker")

SHORT = ("--repeats", "1", "--rounds", "1", "--steps", "2", "--warm-up", "2")


@pytest.mark.thorough
def test_both_checkouts_torch_ddp_and_local_compute_have_figures(tmp_path: Path) -> None:
    path = tmp_path / "warm_call.json"

    bench_warm_call.main([*SHORT, "--against", str(ROOT), "--json", str(path)])
    document = json.loads(path.read_text())
    results = document["results"]

    calls = [f"call{thread}: {name}" for thread in ("", ", this thread") for name in ("against", "ours")]
    assert [name for name in results["cpu_ms"] if name.startswith("call")] == calls
    assert {name.partition(": ")[2] for name in results["cpu_ms"]} == {"ours", "against", "torch DDP", "local compute"}
    assert "step: ours / torch DDP" in results["ratio"]
    assert "call: ours / against" in results["ratio"]
    for row in (*results["cpu_ms"].values(), *results["ratio"].values()):
        assert 0 < row["lowest"] <= row["median"] <= row["highest"]
    assert results["counts"]["ours"] == results["counts"]["against"]  # the same checkout
    assert min(results["counts"]["ours"].values()) > 0
    assert document["environment"]["against_commit"] == document["environment"]["commit"]


def test_frames_files_and_changes_of_file_are_counted(tmp_path: Path) -> None:
    namespace: dict[str, object] = {}
    for name, text in {"b": "def inner(): pass", "a": "def outer():\n    inner()\n    own()\ndef own(): pass"}.items():
        exec(compile(text, f"{tmp_path}/{name}.py", "exec"), namespace)
    calls = worker.Calls(str(tmp_path))

    sys.setprofile(calls)
    namespace["outer"]()  # type: ignore[operator]
    sys.setprofile(None)

    assert calls.summary() == {"frames": 3, "files": 2, "changes of file": 2}  # a, b, a


def test_a_folder_without_the_package_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_warm_call.parse_arguments(["--against", str(tmp_path)])

    assert f"no checkout: got {tmp_path}, expected a folder with legacy_ddp/ in it" in " ".join(
        capsys.readouterr().err.split()
    )
