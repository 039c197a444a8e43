"""The command and the printed result of docs/guides/cross-check.md."""

import re

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.scripts import fork_ranks
from tests.helpers.tiers import count

SEARCHES = count(10, 3)
SCRIPT = str(ROOT / "examples" / "culprit.py")
PAGE = (ROOT / "docs" / "guides" / "cross-check.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"-?\d+([.,]\d+)*(e-?\d+)?")
BIT = re.compile(r"bit \d+ \((mantissa|exponent)\)|bit \d+")


@pytest.mark.thorough
@pytest.mark.slow
def test_every_culprit_is_found() -> None:
    run = fork_ranks(3, SCRIPT, "--times", str(SEARCHES), "--seed", "0", cwd=ROOT)

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


@pytest.mark.thorough
def test_a_search_prints_what_the_page_shows() -> None:
    run = fork_ranks(3, SCRIPT, "--seed", "4", cwd=ROOT)
    block = re.search(r"^    training on 3 ranks.*?^    found 1 of 1$", PAGE, re.MULTILINE | re.DOTALL)

    assert run.returncode == 0, run.stderr
    assert block
    shown = [line[4:] for line in block[0].splitlines()]
    # Not the numbers: the weights follow from the source of this Python's library.
    assert _without_numbers(run.stdout) == _without_numbers("\n".join(shown))


def _without_numbers(text: str) -> str:
    return " ".join(NUMBER.sub("#", BIT.sub("bit", text)).split())
