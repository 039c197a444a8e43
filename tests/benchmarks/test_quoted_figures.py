"""The figures of performance in prose: each is filled from a results file, or stands in a list with the reason."""

import re
from pathlib import Path

import pytest
import tables

from tests.helpers.paths import ROOT

NUMBER = r"\d[\d,]*(?:\.\d+)?"
PERFORMANCE = re.compile(
    rf"{NUMBER}\s*(?:%|per\s+cent)"
    rf"|{NUMBER}\s*(?:ns|µs|ms)\b"
    rf"|{NUMBER}\s*[GM]B/s"
    rf"|{NUMBER}\s+times\b"
    rf"|\b[01]\.\d+(?:\s+to\s+\d+\.\d+)?\s+of\b|\b\d+\.\d+\s+s\b"
    rf"|(?:quicker|faster|slower|longer|shorter)\s+by\s+(?:about\s+)?{NUMBER}"
)
# Not prose: code in fences and indented, in backquotes, targets of links; and what the tool has filled.
NO_PROSE = re.compile(
    r"(?ms:^```.*?^```$)|(?s:<!-- (?:table|figure): .*?<!-- end -->)|`[^`\n]*`|\]\([^)\s]*\)|(?m:^ {4}.*$)"
)
# Settings of the code, assumptions of a calculation, and texts of a report: nothing was measured.
NO_MEASUREMENT = {
    "docs/debugging.md": ["A difference of 0.3 % in a first step is", "| 0.5 times the reference |"],
    "docs/design.md": [
        "a network with a hop of 50 µs and 1 GB/s",
        "Waits are cut into 100 ms slices",
        "takes log2(W) / 2 times the time of a ring (reasoned)",
        "which takes up to 17 times their memory",
        "stands at another line 0.3 s later",
        "poll the maker every 0.05 s + 0.5 ms",
        "without the token within 0.7 s is closed",
    ],
    "docs/logging.md": ["the wait is less than 5% of the step"],
    "docs/multi-host.md": ["a network with a hop of 50 µs and 1 GB/s"],
    "docs/restart.md": ["is repeated 20 times"],
}
# Every row of a table of faults.md names the test that it comes from; benchmarks/README.md is the report of the runs.
PAGES = [page for page in tables.PAGES if page != ROOT / "benchmarks" / "README.md"]


def _unfilled(text: str, allowed: list[str]) -> list[str]:
    """The lines of ``text`` with a figure that the tool has not filled."""
    for snippet in allowed:
        text = re.sub(r"\s+".join(map(re.escape, snippet.split())), "", text)
    prose = NO_PROSE.sub("", text)
    return [prose[: found.start()].rpartition("\n")[2] + found[0] for found in PERFORMANCE.finditer(prose)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_figure_of_performance_in_prose_comes_from_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name == "faults.md":
        text = re.sub(r"(?m)^\|.*\n", "", text)

    assert _unfilled(text, NO_MEASUREMENT.get(str(page.relative_to(ROOT)), [])) == []


def test_the_unreleased_part_of_the_changelog_names_no_figure_of_performance() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = re.search(r"(?ms)^## Unreleased\n(.*?)(?=^## |\Z)", changelog)

    assert unreleased is None or _unfilled(unreleased[1], []) == []


@pytest.mark.parametrize("page", NO_MEASUREMENT)
def test_every_allowed_figure_is_still_on_its_page(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())

    assert [snippet for snippet in NO_MEASUREMENT[page] if snippet not in text] == []


def test_a_figure_that_nothing_filled_is_found_and_filled_figures_code_and_settings_are_none() -> None:
    for text in (
        "torch DDP is quicker by 1 to 20 per cent",
        "a step of a transformer takes 0.75 to 0.80 of torch DDP's",
        "makes a step 1.08 times as long",
        "a call takes 2.4\nms",
        "a digest reads 7 GB/s",
        "| a cell of a table | 12 % |",
        "<!-- figure: transformer -->0.75<!-- end --> of a step, 20 % of the time",
    ):
        assert _unfilled(text, []), text
    for text in (
        "takes <!-- figure: transformer -->0.75 to 0.80<!-- end --> of torch DDP's time",
        "`step % 10`, after 60 seconds, torch 2.13 of Python 3.11",
        "    1 of 576 elements differs (0.2 %)",
        "<!-- table: step -->\n| torch DDP | 2.4 ms |\n<!-- end -->",
    ):
        assert _unfilled(text, []) == [], text
