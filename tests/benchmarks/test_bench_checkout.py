"""Do the benchmarks say which code they measured?"""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))
_checkout = importlib.import_module("_checkout")


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
