"""Are all benchmarks run by one command, and does one that fails show?"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import _checkout
import pytest
import run_all

from tests.helpers.paths import ROOT
from tests.helpers.scripts import heed_ctrl_c


def test_every_benchmark_is_among_them() -> None:
    scripts = {path.name for path in (ROOT / "benchmarks").glob("bench_*.py")}

    assert {run.script for run in run_all.RUNS.values()} == {*scripts, "torch_ddp_faults.py"}


def test_every_kept_result_is_one_of_theirs() -> None:
    kept = list(run_all.RESULTS.glob("*.json"))

    assert kept
    for path in kept:
        assert path.stem in run_all.RUNS
        pinned = "2.11.0" if path.stem.startswith("gpu") else "2.13.0"  # of the machine with a GPU
        assert json.loads(path.read_text())["environment"]["torch"].startswith(pinned)


def test_a_full_run_is_launched_on_its_ranks_and_writes_where_results_are_kept() -> None:
    words = run_all.command("step_4", full=True)

    assert words[words.index("--nproc-per-node") + 1] == "4"
    assert words[words.index("--json") + 1] == str(run_all.RESULTS / "step_4.json")
    assert "--json" not in run_all.command("step_2", full=False)
    assert "torch.distributed.run" not in run_all.command("memory", full=False)
    assert "sparse embedding" in run_all.command("step_others_2", full=True)
    short, full = (run_all.command("agree_header_64", full=full) for full in (False, True))
    assert [words[words.index("--nproc-per-node") + 1] for words in (short, full)] == ["8", "64"]


def test_a_failure_does_not_keep_others_from_running_and_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = {
        "fails": run_all.Run("bench_trace.py", 0, "", "--no-such-option"),
        "cannot": run_all.Run("bench_trace.py", 0, "", "", lambda: "it is Sunday"),
        "full only": run_all.Run("bench_trace.py", 0, ""),
        "works": run_all.Run("bench_trace.py", 0, "", "--help"),
    }
    monkeypatch.setattr(run_all, "RUNS", runs)

    with pytest.raises(SystemExit, match="failed: fails"):
        run_all.main([])

    said = capfd.readouterr().out
    assert "--- cannot: left out, it is Sunday" in said
    assert "--- works: " in said
    assert "exit code 0" in said
    assert "--- full only: left out, only in full (make bench-full BENCH=full only)" in said
    assert said.startswith("2 of 4 benchmarks will run\n")


def test_started_as_a_script_it_says_what_there_is() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "run_all.py"), "--only", "nothing"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert run.returncode == 2
    assert run.stderr.startswith("no benchmark is called 'nothing', expected one of step_2, ")
    assert max(map(len, run.stderr.splitlines())) <= 80


TAKES_A_SECOND_TO_CLEAN_UP = """
import signal, time
try:
    print("ready", flush=True)
    signal.pause()
except KeyboardInterrupt:
    time.sleep(1)
    print("clean", flush=True)
"""
RUN_IT = """
import sys
from _interrupt import quiet_interrupt
from run_all import run_one
with quiet_interrupt():
    run_one([sys.executable, "-c", sys.argv[1]])
"""


def test_at_ctrl_c_a_benchmark_has_time_to_clean_up() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_IT, TAKES_A_SECOND_TO_CLEAN_UP],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT / "benchmarks",
        start_new_session=True,  # Ctrl-C goes to all of a group
        preexec_fn=heed_ctrl_c,
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)

    assert process.communicate(timeout=60) == ("clean\n", "")
    assert process.returncode == 130


# The code that was measured


def _git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    for name in ("legacy_ddp/_core.py", "benchmarks/bench.py", "benchmarks/results/step.json", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before\n")
    _git(tmp_path, "init", "--quiet")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "--quiet", "--message", "all")
    return tmp_path


@pytest.mark.parametrize(
    "changed,mark",
    [
        ("legacy_ddp/_core.py", "-dirty"),
        ("legacy_ddp/_new.py", "-dirty"),
        ("benchmarks/bench.py", "-dirty"),
        ("benchmarks/results/step.json", ""),
        ("README.md", ""),
    ],
)
def test_a_commit_is_marked_if_what_is_measured_is_not_as_committed(committed: Path, changed: str, mark: str) -> None:
    commit = _git(committed, "rev-parse", "HEAD")

    assert _checkout.commit(committed) == commit
    (committed / changed).write_text("after\n")
    assert _checkout.commit(committed) == commit + mark


def test_without_git_the_commit_is_unknown(committed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    assert _checkout.commit(committed) == "unknown"


def test_what_is_started_finds_the_checkout_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")

    assert _checkout.environment()["PYTHONPATH"] == os.pathsep.join([str(ROOT), "elsewhere"])
