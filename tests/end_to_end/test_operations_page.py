"""The commands and printed results of docs/operations.md."""

import re
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.scripts import fork_ranks, fork_script

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
# tests/debug has the same comparisons on smaller runs.
pytestmark = pytest.mark.thorough
NUMBER = re.compile(r"\b[0-9a-f]{16}\b")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the traces of the four commands of the page."""
    folder = tmp_path_factory.mktemp("runs")
    commands = re.findall(r"--nproc-per-node 2 examples/hunts/wrong_product\.py (.*)", PAGE)
    assert len(commands) == 4
    for arguments in commands:
        run = fork_ranks(2, str(ROOT / "examples/hunts/wrong_product.py"), *arguments.split(), cwd=folder)
        assert run.returncode == 0, run.stderr
    return folder


def _shown_after(text: str) -> str:
    """The words of the indented block of the page that follows ``text``."""
    _, after = PAGE.split(text, 1)
    block = re.search(r"\n\n((?:    .*\n)+)", after)
    assert block, text
    return NUMBER.sub("#", " ".join(block[1].split()))


def _printed(folder: Path, *arguments: str) -> str:
    found = fork_script("-m", "legacy_ddp", *arguments, cwd=folder)
    assert found.returncode == 1, found.stderr
    return NUMBER.sub("#", " ".join(found.stdout.split()))


def test_the_step_is_named_with_the_next_command(runs: Path) -> None:
    printed = _printed(runs, "diff", "good", "bad")

    first, last = _shown_after("ends with the next command:").split(" ... ")
    assert printed.startswith(first)
    assert printed.endswith(last)


def test_the_operation_is_named(runs: Path) -> None:
    assert _shown_after("The text has a section more:") in _printed(runs, "diff", "good-7", "bad-7")


def test_ranks_of_the_run_with_the_fault_agree_in_their_operations(runs: Path) -> None:
    found = fork_script("-m", "legacy_ddp", "diff", "bad-7", cwd=runs)

    assert found.returncode == 0, found.stderr
    assert "operations of step 7 agree between ranks" in " ".join(found.stdout.split())
