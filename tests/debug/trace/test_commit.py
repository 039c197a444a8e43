"""The commit of a working directory, against git itself."""

import os
import subprocess
import time
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from torch import nn

import legacy_ddp
from legacy_ddp.debug import Recorder
from tests.helpers import logged_warnings
from tests.helpers.recorded import Recorded

pytestmark = pytest.mark.usefixtures("alone")
UNKNOWN = "not known"
_IDENTITY = ("-c", "user.name=n", "-c", "user.email=n@example.org")


def _git(folder: Path, *arguments: str) -> str:
    run = subprocess.run(["git", *_IDENTITY, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def _facts(folder: Path) -> dict[str, str]:
    """The environment that a recorder writes in a process with this working directory."""
    with TemporaryDirectory() as trace:
        with chdir(folder), Recorder(nn.Linear(1, 1), trace):
            pass
        logged_warnings.take()  # it holds no step
        facts: dict[str, str] = Recorded(Path(trace)).environment.facts
    return facts


def commit_of(folder: Path) -> str:
    return _facts(folder)["commit"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "inner").mkdir(parents=True)
    _git(folder, "init", "--quiet")
    (folder / "file").write_text("one")
    _git(folder, "add", "file")
    _git(folder, "commit", "--quiet", "--message", "first")
    return folder


def test_the_hash_of_the_commit_is_that_of_git_and_a_worktree_has_its_own(repository: Path) -> None:
    head = _git(repository, "rev-parse", "HEAD")

    assert commit_of(repository) == head
    assert commit_of(repository / "inner") == head
    _git(repository, "pack-refs", "--all")
    assert commit_of(repository) == head
    _git(repository, "checkout", "--quiet", "--detach")
    assert commit_of(repository) == head
    _git(repository, "worktree", "add", "--quiet", "-b", "other", "../worktree")
    worktree = repository.parent / "worktree"
    _git(worktree, "commit", "--quiet", "--allow-empty", "--message", "second")
    assert commit_of(worktree) == _git(worktree, "rev-parse", "HEAD") != head == commit_of(repository)


def test_a_changed_file_is_told_and_an_untracked_file_is_not(repository: Path) -> None:
    head = _git(repository, "rev-parse", "HEAD")
    (repository / "new").write_text("untracked")
    assert commit_of(repository) == head
    (repository / "file").write_text("two")
    assert commit_of(repository) == f"{head}, modified"
    _git(repository, "add", "file")
    assert commit_of(repository) == f"{head}, modified"


def test_two_checkouts_of_the_library_are_told_apart_and_an_installed_package_has_no_commit(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(of: Path) -> str:
        monkeypatch.setattr(legacy_ddp, "__file__", str(of / "legacy_ddp/__init__.py"))
        return _facts(repository)["legacy_ddp"]

    head, plain = _git(repository, "rev-parse", "HEAD"), legacy_ddp.__version__
    installed = repository / "venv" / "site-packages"
    installed.mkdir(parents=True)

    assert [version(repository), version(installed)] == [f"{plain}, commit {head}", plain]
    (repository / "file").write_text("two")
    assert version(repository) == f"{plain}, commit {head}, modified"
    _git(repository, "worktree", "add", "--quiet", "-b", "other", "../worktree")
    assert version(repository.parent / "worktree") == f"{plain}, commit {head}"


def test_the_repository_is_only_read(repository: Path) -> None:
    index = repository / ".git/index"
    os.utime(repository / "file", (1, 1))  # git status would note the new time in the index
    before = index.read_bytes()
    _git(repository, "config", "core.fsmonitor", "touch ran; false")

    commit_of(repository)

    assert index.read_bytes() == before
    assert not (repository / "ran").exists()


def test_without_a_repository_a_commit_or_git_the_commit_is_not_known(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit_of(tmp_path) == UNKNOWN
    _git(tmp_path, "init", "--quiet")
    assert commit_of(tmp_path) == UNKNOWN
    monkeypatch.setenv("PATH", "/nowhere")
    assert commit_of(repository) == UNKNOWN


def test_a_git_that_does_not_answer_is_not_waited_for(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "programs/git"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(legacy_ddp, "__file__", str(tmp_path / "legacy_ddp/__init__.py"))  # one git, not two

    start = time.monotonic()
    assert commit_of(repository) == UNKNOWN
    assert time.monotonic() - start < 300  # of the 600 that the program sleeps
