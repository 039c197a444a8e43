"""From traces to a page in one call: the page has the findings of the comparison."""

import re
import sys
from pathlib import Path

import pytest

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._page.page import write_page
from legacy_ddp.debug._trace.run import open_run
from tests.helpers.traces import NAMES, write_trace

PLANTED = {(1, 3, "parameters", "parameter 'b'"): ("ff" * 8, 2.0)}


@pytest.mark.parametrize("runs, words", [(1, "✗ DIFFERENT"), (2, "✗ DIFFERENT"), (-2, "✓ SAME")])
def test_a_page_says_what_was_found(tmp_path: Path, runs: int, words: str) -> None:
    traces = [write_trace(tmp_path / "a", planted=PLANTED)]
    if runs != 1:
        traces.append(write_trace(tmp_path / "b", planted=PLANTED if runs < 0 else {}))
    opened = [open_run(trace) for trace in traces]
    read: list[int] = []

    write_page(opened, tmp_path / "report.html", read.append)

    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    banner = re.search(r'<div class="banner \w+"><b>(.*?)</b>(.*?)</div>', page)
    assert banner is not None
    assert banner[1] == words
    assert ("parameter &#39;b&#39;" in banner[2]) == ("DIFFERENT" in words)
    assert "different:" not in banner[2]
    assert sum(read) == 2 * sum(run.size_bytes for run in opened)


def test_a_trace_that_cannot_be_read_leaves_no_page(tmp_path: Path) -> None:
    run = open_run(write_trace(tmp_path / "a"))
    run.paths[1].unlink()

    with pytest.raises(TraceError, match=r"rank-00001\.jsonl"):
        write_page([run], tmp_path / "report.html")

    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_parameter_that_only_rank_1_has_does_not_end_the_page_in_a_key_error(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "a", world_size=2, steps=3)
    more = {**NAMES, "parameters": ("parameter 'a'", "parameter 'b'", "parameter 'c'")}
    rank_1 = write_trace(tmp_path / "b", world_size=2, steps=3, names=more) / "rank-00001.jsonl"
    rank_1.replace(folder / "rank-00001.jsonl")

    write_page([open_run(folder)], tmp_path / "report.html")

    assert "✗ DIFFERENT" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
def test_a_trace_and_a_page_whose_names_are_no_utf_8_are_written_with_escapes(tmp_path: Path) -> None:
    names = {**NAMES, "parameters": ("parameter 'a'", "parameter \ud800")}
    folder = write_trace(
        tmp_path / "a\udcff", names=names, planted={(1, 3, "parameters", "parameter \ud800"): ("ff" * 8, 2.0)}
    )

    write_page([open_run(folder)], tmp_path / "b\udcfe.html")

    page = (tmp_path / "b\udcfe.html").read_text(encoding="utf-8")
    assert rf"trace: {tmp_path}/a\udcff" in page
    assert r"parameter \ud800" in page
