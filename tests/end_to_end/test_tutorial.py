"""The scripts of the first page and of the tutorial print what the pages show."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.scripts import fork_ranks, fork_script
from tests.helpers.tiers import thorough

DOCS = ROOT / "docs"
PAGES = [
    DOCS / "index.md",
    *sorted(page for page in (DOCS / "tutorial").glob("*.md") if page.name != "index.md"),
]
SCRIPT = re.compile(r"^Save as `(\w+\.py)`:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A command, and the indented lines below.
COMMAND = re.compile(r"^    \$ (.*)\n((?:    (?!\$).*\n)*)", re.MULTILINE)
RANKS = re.compile(r"torchrun --standalone --nproc-per-node (\d+) (.*)")


def _run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    ranks = RANKS.fullmatch(command)
    if ranks:
        return fork_ranks(int(ranks[1]), *ranks[2].split(), cwd=folder)
    program, *words = command.split()
    assert program == "python", command
    return fork_script(*words, cwd=folder)


# test_whole_script.py trains and resumes such scripts, too.
@pytest.mark.parametrize(
    "page",
    [thorough(page) if page.stem in ("whole-script", "resume") else page for page in PAGES],
    ids=lambda page: page.stem,
)
def test_the_scripts_of_a_page_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    scripts, commands = dict(SCRIPT.findall(text)), COMMAND.findall(text)
    assert len(scripts) == text.count("```python")
    for name, script in scripts.items():
        (tmp_path / name).write_text(script)
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    for command, shown in commands:
        run = _run(command, tmp_path)
        assert run.returncode == 0, run.stderr
        assert run.stdout.splitlines() == [line.removeprefix("    ") for line in shown.splitlines()], command

    assert all(any(name in command for command, _ in commands) for name in scripts), "a script that nobody runs"
