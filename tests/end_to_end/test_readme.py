"""The example and the commands of the README, and the scripts of the first page and of the tutorial."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT, python_blocks
from tests.helpers.scripts import fork_ranks, fork_script, fork_torchrun
from tests.helpers.tiers import thorough

README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = python_blocks("README.md")


def test_the_readme_s_example_runs_on_two_ranks_and_prints_what_the_page_shows(tmp_path: Path) -> None:
    shown = re.search(r"^    \$ torchrun .* train\.py\n    (.*)\n", README, re.MULTILINE)
    assert shown
    # A file per rank: lines of several ranks on one pipe may interleave.
    count = "\nimport os\nopen(f'calls-{os.environ[\"RANK\"]}', 'w').write(str(record.call))\n"
    (tmp_path / "train.py").write_text(EXAMPLES[0] + count)

    run = fork_torchrun(2, str(tmp_path / "train.py"), cwd=tmp_path)

    assert run.returncode == 0, run.stderr
    assert [(tmp_path / f"calls-{rank}").read_text() for rank in range(2)] == ["20", "20"]
    assert run.stdout.splitlines() == [shown[1]]


def test_the_readme_s_two_lines_for_a_plain_module_take_the_place_of_the_wrapper(tmp_path: Path) -> None:
    shown = re.search(r"^    \$ torchrun .* train\.py\n    (.*)\n", README, re.MULTILINE)
    lines = re.search(r"^    (from .* import all_reduce_gradients)\n    (all_reduce_gradients\(module\))", README, re.M)
    assert shown
    assert lines
    script = EXAMPLES[0].replace("from legacy_ddp import LegacyDistributedDataParallel", lines[1])
    script = script.replace("LegacyDistributedDataParallel(torch.nn.Linear(10, 1))", "module = torch.nn.Linear(10, 1)")
    (tmp_path / "train.py").write_text(script.replace("model.all_reduce()", lines[2]))

    run = fork_torchrun(2, str(tmp_path / "train.py"), cwd=tmp_path)

    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [shown[1]]


def test_the_readme_s_line_for_plain_python_makes_a_group_of_one_rank(tmp_path: Path) -> None:
    line = re.search(r"^    (torch\.distributed\.init_process_group\(.*HashStore.*)$", README, re.MULTILINE)
    assert line
    script = EXAMPLES[0].replace('torch.distributed.init_process_group("gloo")', line[1])
    assert line[1] in script
    (tmp_path / "train.py").write_text(script)

    run = fork_script("train.py", cwd=tmp_path)

    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("call 20: mean over 1 ranks, ")


def test_the_readme_s_recorder_goes_around_the_loop_of_its_example(tmp_path: Path) -> None:
    begin, loop, end = re.split(r"(?m)^(for step.*?\n(?: .*\n)+)", EXAMPLES[0])
    recorded = EXAMPLES[1].replace("    ...\n", re.sub(r"(?m)^", "    ", loop).rstrip() + "\n")
    for folder in ("before", "after"):
        (tmp_path / "train.py").write_text(begin + recorded.replace('"before"', repr(folder)) + end)
        run = fork_ranks(2, "train.py", cwd=tmp_path)
        assert run.returncode == 0, run.stderr

    found = fork_script("-m", "legacy_ddp", "diff", "before", "after", cwd=tmp_path)

    assert found.returncode == 1, found.stderr  # the example has no seed
    assert "The runs begin with other weights" in found.stdout
    assert "Their seeds differ." in found.stdout


@pytest.mark.thorough  # tests/debug has the texts of the command
def test_the_command_answers_what_the_readme_shows(tmp_path: Path) -> None:
    shown = re.search(r"^    \$ legacy-ddp diff before after\n((?:    .*\n|\n)+)", README, re.MULTILINE)
    assert shown
    for folder, rate in (("before", "0.004"), ("after", "0.005")):
        script = str(ROOT / "examples" / "train_lm.py")
        run = fork_ranks(2, script, "--steps", "2", "--lr", rate, "--held-out", "256", "--record", folder, cwd=tmp_path)
        assert run.returncode == 0, run.stderr

    found = fork_script("-m", "legacy_ddp", "diff", "before", "after", cwd=tmp_path)

    assert found.returncode == 1, found.stderr
    printed = " ".join(found.stdout.split()).replace(f"{ROOT}/", "")  # lines end elsewhere with another path
    assert printed.startswith(" ".join(shown[1].split()))


# The tutorial prints what its pages show

DOCS = ROOT / "docs"
PAGES = [DOCS / "index.md", *sorted(page for page in (DOCS / "tutorial").glob("*.md") if page.name != "index.md")]
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
