"""The commands and printed results of docs/debugging.md, docs/operations.md and docs/guides/cross-check.md."""

import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.scripts import fork_ranks, fork_script
from tests.helpers.tiers import count, thorough

HUNTS = count(10, 3)
PAGE = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"\b[0-9a-f]{16}\b|-?\d+(\.\d+)?(e-?\d+)?")


def _launch(
    script: str, *arguments: str, ranks: int = 3, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return fork_ranks(ranks, str(ROOT / "examples" / script), *arguments, cwd=folder or ROOT)


def _shown_after(text: str, page: str = PAGE) -> list[str]:
    """The indented block of the page that follows ``text``."""
    _, after = page.split(text, 1)
    block = re.search(r"\n\n((?:(?:    .*)?\n)+)", "\n" + after)
    assert block, text
    return [line[4:] for line in block[1].strip("\n").splitlines()]


def _without_numbers(lines: list[str]) -> list[str]:
    return [NUMBER.sub("#", line) for line in lines]


@pytest.mark.thorough
@pytest.mark.slow
def test_every_bit_is_found() -> None:
    run = _launch("hunt.py", "--times", str(HUNTS), "--seed", "5")

    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith(f"\nfound {HUNTS} of {HUNTS}\n")
    # What was found is compared inside the hunt; here with what a reader sees.
    planted = re.findall(r"planted: rank (\d), after step (\d+), ('\S+') at (\(.*?\)), bit (\d+)", run.stdout)
    reported = re.findall(
        r"call (\d+): replicas differ in 1 of 7 parameters\n  who: rank (\d) .*?"
        r"parameter ('\S+'), .*?first\s+at\s+(\(.*?\)): .*?one\s+bit\s+flipped: bit (\d+)",
        run.stdout,
        re.DOTALL,
    )
    assert len(planted) == HUNTS
    assert planted == [(rank, str(int(call) - 1), name, place, bit) for call, rank, name, place, bit in reported]
    # Of the first hunt the page shows all but the numbers: the weights follow from the source of this Python's library.
    *hunt, _, _ = _without_numbers(_shown_after("below, is that of the same Python: `.venv/bin/torchrun`.\n"))
    assert _without_numbers(run.stdout.strip().splitlines())[: len(hunt)] == hunt


@pytest.mark.parametrize("script", ["nan.py", thorough("batch_norm.py")])
def test_a_hunt_prints_what_the_page_shows(script: str) -> None:
    run = _launch(f"hunts/{script}")
    shown = _without_numbers(_shown_after(f"--nproc-per-node 3 examples/hunts/{script}\n"))

    assert run.returncode == 0, run.stderr
    printed = _without_numbers(run.stdout.splitlines())
    if "    ..." in shown:  # the page leaves lines out there
        cut = shown.index("    ...")
        assert shown[:cut] == printed[:cut]
        shown, printed = shown[cut + 1 :], printed[-len(shown) + cut + 1 :]
    assert printed == shown


@pytest.mark.thorough
def test_the_hunt_of_a_forgotten_call_names_the_rank_that_forgot_it() -> None:
    run = _launch("hunts/forgotten_call.py")
    shown = " ".join("\n".join(_shown_after("examples/hunts/forgotten_call.py\n")).split())
    printed = " ".join(run.stdout.split())

    assert run.returncode == 0, run.stderr
    for words in (
        "rank 1: UnsynchronizedStepError: step() of AdamW would use gradients that were not reduced",
        "rank 0: PeerLostError: all_reduce() call 6, phase agree: connection lost",
        "missing rank 1 (left without an error after all_reduce() call 5, at the end of its script",
    ):
        assert words in shown
        assert words in printed


@pytest.mark.thorough
def test_the_hunt_for_two_runs_prints_what_the_page_shows(tmp_path: Path) -> None:
    commands = re.findall(r"^    PYTHONPATH=\. torchrun .* examples/train_lm\.py (.*--record .*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        trained = _launch("train_lm.py", *command.split(), "--held-out", "256", ranks=2, folder=tmp_path)
        assert trained.returncode == 0, trained.stderr

    found = fork_script("-m", "legacy_ddp", "diff", "before", "after", cwd=tmp_path)

    assert found.returncode == 1, found.stderr
    shown = _shown_after("the command is `python -m legacy_ddp diff before after`.\n")
    assert _unwrapped(found.stdout.splitlines()) == _unwrapped(shown)


def _unwrapped(lines: list[str]) -> str:
    """Numbers differ between versions of Python, whose source is the text, and so may the ends of lines. The command
    line of the test has another path, and the test's own option."""
    text = " ".join(" ".join(lines).split()).replace(f"{ROOT}/", "").replace(" --held-out 256", "")
    return NUMBER.sub("#", text)


def test_the_lines_of_the_page_are_those_of_the_scripts() -> None:
    hunted = re.findall(r"^.*# the hunt$", PAGE, re.MULTILINE)

    assert len(hunted) == 2
    for line, script in zip(hunted, ("nan.py", "batch_norm.py"), strict=True):
        assert line in (ROOT / "examples" / "hunts" / script).read_text(encoding="utf-8").splitlines()


# docs/operations.md

OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
DIGEST = re.compile(r"\b[0-9a-f]{16}\b")


def _words_after(text: str) -> str:
    """The words of the indented block of the page that follows ``text``."""
    return DIGEST.sub("#", " ".join(" ".join(_shown_after(text, OPERATIONS)).split()))


def _printed(folder: Path, *arguments: str) -> str:
    found = fork_script("-m", "legacy_ddp", *arguments, cwd=folder)
    assert found.returncode == 1, found.stderr
    return DIGEST.sub("#", " ".join(found.stdout.split()))


@pytest.mark.thorough  # tests/debug has the same comparisons on smaller runs
def test_the_step_and_the_operation_are_named_by_the_four_commands_of_the_page(tmp_path: Path) -> None:
    commands = re.findall(r"--nproc-per-node 2 examples/hunts/wrong_product\.py (.*)", OPERATIONS)
    assert len(commands) == 4
    for arguments in commands:
        run = _launch("hunts/wrong_product.py", *arguments.split(), ranks=2, folder=tmp_path)
        assert run.returncode == 0, run.stderr

    printed = _printed(tmp_path, "diff", "good", "bad")
    first, last = _words_after("ends with the next command:").split(" ... ")
    assert printed.startswith(first)
    assert printed.endswith(last)
    assert _words_after("The text has a section more:") in _printed(tmp_path, "diff", "good-7", "bad-7")


# docs/guides/cross-check.md

SEARCHES = count(10, 1)
CROSS_CHECK = (ROOT / "docs" / "guides" / "cross-check.md").read_text(encoding="utf-8")
ANY_NUMBER = re.compile(r"-?\d+([.,]\d+)*(e-?\d+)?")
BIT = re.compile(r"bit \d+ \((mantissa|exponent)\)|bit \d+")


@pytest.mark.thorough
@pytest.mark.slow
def test_every_culprit_is_found() -> None:
    run = _launch("culprit.py", "--times", str(SEARCHES), "--seed", "4")
    block = re.search(r"^    training on 3 ranks.*?(?=^    found 1 of 1$)", CROSS_CHECK, re.MULTILINE | re.DOTALL)

    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith(f"\nfound {SEARCHES} of {SEARCHES}\n")
    # What was found is compared inside the search; here with what a reader sees.
    planted = re.findall(r": rank (\d), (\w+ of \w+ \(\S+\)), bit (\d+) of the element (\(.*?\))", run.stdout)
    reported = re.findall(
        r"check\(\) call \d+: rank (\d) computes differently\n.*?"
        r"where: (.*?): inputs agree.*?first\s+at\s+(\(.*?\)): .*?one\s+bit\s+flipped: bit (\d+)",
        run.stdout,
        re.DOTALL,
    )
    assert len(planted) == SEARCHES
    assert planted == [(rank, " ".join(where.split()), bit, place) for rank, where, place, bit in reported]
    assert block  # of the first search, but for the numbers
    assert _without_any_number(run.stdout).startswith(_without_any_number(textwrap.dedent(block[0])))


def _without_any_number(text: str) -> str:
    return " ".join(ANY_NUMBER.sub("#", BIT.sub("bit", text)).split())
