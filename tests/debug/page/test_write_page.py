"""The report page: content, escaping, no network access, and atomic replacement of the file."""

import os
import re
import stat
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._diff.result import Answer, Comparison
from legacy_ddp.debug._page.page import publish, render, reserved, write_page
from legacy_ddp.debug._trace.read import Run, open_run
from legacy_ddp.debug._trace.records import RANK_FILE, Environment
from tests.helpers.paths import ROOT
from tests.helpers.traces import NAMES, call_facts, end_after, environment, without, write_trace

EVIL = "</script><script>alert(1)</script><img src=https://example.com/a.png>&\"'"
OLD = "<!DOCTYPE html>\n<!-- a report of legacy_ddp -->\nthe old one"
VERDICT_WORDS: dict[Answer, str] = {"same": "SAME", "different": "DIFFERENT", "unknown": "CANNOT TELL"}


class _Reader(HTMLParser):
    """The texts outside of scripts and styles, and the tags with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._inside: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not self._inside or self._inside[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


def _run(folder: Path, **more: Any) -> Run:
    return open_run(write_trace(folder, **more))


def _page(*runs: Run, verdict: Answer = "different", headline: str = "Ranks differ", text: str = "the text") -> str:
    folders = tuple(str(run.folder) for run in runs)
    return render(runs, Comparison(folders, verdict, headline), text.splitlines())


def _read(*runs: Run, **more: Any) -> _Reader:
    return _Reader(_page(*runs, **more))


@pytest.mark.parametrize("verdict", ["same", "different", "unknown"])
def test_the_verdict_is_text_and_not_by_colour_alone(tmp_path: Path, verdict: Answer) -> None:
    headline = f"{VERDICT_WORDS[verdict].lower()}: What was found."  # the word comes once
    page = _read(_run(tmp_path / "a"), verdict=verdict, headline=headline, text="first line\n  second line")

    assert f"{VERDICT_WORDS[verdict]} What was found." in page.text
    assert ("div", {"class": f"banner {verdict}"}) in page.tags
    assert "first line\n  second line" in page.texts
    assert "Report: a" in page.text


def test_all_charts_are_there_with_their_words(tmp_path: Path) -> None:
    one, other = _run(tmp_path / "a"), _run(tmp_path / "b")

    alone, both = _read(one), _read(one, other)

    for title in ("Reduced gradients, by", "Local gradients:", "Who waited for whom", "Gradient noise scale"):
        assert title in alone.text
    for title in ("Difference of the two", "Local gradients:", "whom: A", "whom: B", "Gradient noise scale"):
        assert title in both.text
    assert "Report: a against b" in both.text
    assert "dashed lines: B" in both.text
    assert "larger of two differences: that of the reduced gradient, and that of the parameter" in both.text
    assert "Ranks are compared each with its own." in both.text


def _only_environments(folder: Path, ranks: tuple[int, ...]) -> Run:
    """A run of two ranks of which some were killed before they recorded their start."""
    write_trace(folder)
    for rank in ranks:
        end_after(folder / RANK_FILE.format(rank), None)
    return open_run(folder)


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("others", [None, (), (0, 1)])
def test_a_rank_that_recorded_nothing_leaves_a_page_that_says_so(
    tmp_path: Path, ranks: tuple[int, ...], others: tuple[int, ...] | None
) -> None:
    runs = [_only_environments(tmp_path / "a", ranks)]
    if others is not None:
        runs.append(_only_environments(tmp_path / "b", others))

    write_page(runs, tmp_path / "page.html")

    page = _Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "CANNOT TELL" in page.text
    assert "Local gradients:" in page.text
    assert ("Left out: no finite norm of a local gradient is in the trace." in page.text) == (
        len(ranks) == 2 and others != ()
    )


@pytest.mark.parametrize("norm", [1e160, 1.7e308])
def test_norms_whose_squares_or_sums_no_float64_holds_are_shown(tmp_path: Path, norm: float) -> None:
    names = NAMES["reduced_gradients"]
    planted = {
        (rank, step, phase, name): (f"{step:016x}", norm)
        for rank in (0, 1)
        for step in range(1, 6)
        for phase in ("reduced_gradients", "parameters")
        for name in (names if phase == "reduced_gradients" else NAMES["parameters"])
    }
    run = _run(tmp_path / "a", planted=planted, calls=lambda step, rank: call_facts(step, rank, local_norm=norm))

    page = _read(run)

    assert "have a finite norm in the trace" in page.text  # a noise scale needs squares
    assert "Local gradients: every rank's own norm" in page.text


def test_what_comes_from_a_trace_is_escaped_wherever_it_shows(tmp_path: Path) -> None:
    names = {
        **NAMES,
        "reduced_gradients": (f"gradient of {EVIL!r}", "gradient of 'b'"),
        "parameters": (f"parameter {EVIL!r}", "parameter 'b'"),
    }

    def evil(rank: int, size: int) -> Environment:
        return environment(rank, size, facts={EVIL: EVIL}, started=EVIL, layout=EVIL)

    run = _run(tmp_path / "a", names=names, environments=evil, end=EVIL)
    page = _page(run, headline=EVIL, text=EVIL)
    tags = [tag for tag, _ in _Reader(page).tags]

    assert EVIL in _Reader(page).text
    assert tags.count("script") == _page(_run(tmp_path / "plain")).count("<script")
    assert "img" not in tags
    assert "<script>alert" not in page
    assert "<img src" not in page


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    page = _read(_run(tmp_path / "a"))
    (policy,) = [attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]

    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    for tag, attributes in page.tags:
        assert "src" not in attributes, tag
        assert attributes.get("href") in (None, "data:,"), tag


@pytest.mark.parametrize(
    "facts, other, expected",
    [
        ({"threads": "1"}, {"threads": "1"}, "threads 1 1 "),
        ({"threads": "1"}, {"threads": "2"}, "threads 1 2 runs differ"),
        ({"threads": "1"}, {}, "threads 1 nothing runs differ"),
    ],
)
def test_facts_that_differ_between_runs_are_marked_in_words(
    tmp_path: Path, facts: dict[str, str], other: dict[str, str], expected: str
) -> None:
    runs = [
        _run(tmp_path / name, environments=lambda rank, size, held=held: environment(rank, size, facts=held))
        for name, held in (("a", facts), ("b", other))
    ]
    text = _read(*runs).text

    assert expected in text
    assert ("1 of 8 lines differ" in text) == (facts != other)


def test_facts_that_differ_between_ranks_are_marked_with_whose_they_are(tmp_path: Path) -> None:
    run = _run(
        tmp_path / "a",
        world_size=4,
        environments=lambda rank, size: environment(rank, size, facts={"host": "ab"[rank == 2]}, started=str(rank)),
    )
    text = _read(run).text

    assert "host ranks 0-1, 3: a; rank 2: b ranks differ" in text
    assert "1 of 8 lines differ" in text  # not when ranks started


def test_many_values_of_a_fact_are_cut(tmp_path: Path) -> None:
    run = _run(
        tmp_path / "a",
        world_size=9,
        steps=1,
        environments=lambda rank, size: environment(rank, size, facts={"pid": str(100 + rank)}),
    )

    assert "rank 5: 105; 3 more values ranks differ" in _read(run).text


def test_the_end_of_every_trace_is_shown(tmp_path: Path) -> None:
    text = _read(_run(tmp_path / "a"), _run(tmp_path / "b", end=None)).text

    assert "end of the trace closed no last line: killed, still running, or recorder stopped runs differ" in text


def test_the_page_says_that_steps_share_columns(tmp_path: Path) -> None:
    names = {"reduced_gradients": ("gradient of 'a'",)}
    text = _read(_run(tmp_path / "a", steps=801, world_size=1, names=names)).text

    assert "Each column stands for 3 steps and shows the largest value among them" in text
    assert "Each row stands for" not in text


def test_the_page_says_that_parameters_share_rows_and_points_were_left_out(tmp_path: Path) -> None:
    names = {"reduced_gradients": tuple(f"gradient of 'p{index}'" for index in range(1200))}
    text = _read(_run(tmp_path / "a", steps=1, names=names)).text

    assert "Each row stands for 3 parameters" in text
    assert "Each column stands for" not in text
    assert "a line goes through" not in text


def test_the_page_says_which_points_a_line_goes_through(tmp_path: Path) -> None:
    text = _read(_run(tmp_path / "a", steps=2001, names={})).text

    assert "Of every 3 recorded steps a line goes through the smallest and the largest value." in text
    assert "Each column stands for 6 steps and shows the longest wait." in text
    assert "Left out: the trace holds neither reduced gradients nor parameters." in text


def test_steps_that_only_another_rank_has_are_shown_too(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", steps=801, names={}, end=None)
    lines = run.paths[0].read_bytes().splitlines(keepends=True)
    run.paths[0].write_bytes(b"".join(lines[:300]))

    assert "Each column stands for 3 steps and shows the longest wait." in _read(run).text


def test_a_column_says_how_many_steps_lie_between_recorded_ones(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", steps=3)
    for path in run.paths:
        without(path, lambda line: b'"step":2,' in line)

    assert "Each column stands for a recorded step, every 2." in _read(run).text


def test_what_cannot_be_shown_is_left_out_with_a_reason(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", world_size=1, calls=lambda step, rank: call_facts(step, rank, local_norm=None))
    text = _read(run).text

    assert "Left out: it compares ranks, and there is only one." in text
    assert "Left out: a single rank waits for no other rank." in text
    assert "Left out: no finite norm of a local gradient is in the trace." in text


def test_a_trace_that_ends_at_its_start_is_a_page_all_the_same(tmp_path: Path) -> None:
    text = _read(_run(tmp_path / "a", steps=0)).text

    assert "Left out: no call is in the trace." in text
    assert "Reduced gradients, by parameter and step" in text


def _write(output: Path, page: str = "<!DOCTYPE html>\n<!-- a report of legacy_ddp -->\n") -> None:
    with reserved(output) as part:
        publish(page, part, output)


def test_a_page_of_ours_is_replaced_and_nothing_else_is_left_there(tmp_path: Path) -> None:
    output = tmp_path / "report.html"

    _write(output, _page(_run(tmp_path / "a")))
    _write(output)
    _write(output, "third")

    assert output.read_text() == "third"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "report.html"]


def test_the_page_may_be_read_by_whom_other_new_files_may(tmp_path: Path) -> None:
    (tmp_path / "other").touch()

    _write(tmp_path / "report.html")

    assert (tmp_path / "report.html").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("content", ["somebody's notes", "<!DOCTYPE html>\n<html>", '{"line":"environment"}'])
def test_a_file_that_is_no_page_of_ours_is_not_touched(tmp_path: Path, content: str) -> None:
    output = tmp_path / "notes"
    output.write_text(content)

    with pytest.raises(TraceError, match=r"notes exists and is no report; name another place with -o, or remove it"):
        _write(output)

    assert output.read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_an_empty_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "report.html").touch()

    _write(tmp_path / "report.html")

    assert (tmp_path / "report.html").stat().st_size


def test_a_place_that_holds_no_file_is_one_clear_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    for output in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(TraceError, match=f"^{output} is no file, expected a place for a page; name another one"):
            _write(output)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_place_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(TraceError, match=r"/none/report\.html cannot be written: No such file or directory; name"):
        _write(tmp_path / "none" / "report.html")
    with pytest.raises(TraceError, match=r"/file/report\.html cannot be .*: Not a directory; name"):
        _write(tmp_path / "file" / "report.html")


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    _write(output, OLD)

    with reserved(output) as part:
        part.unlink()
        part.mkdir()
        with pytest.raises(TraceError, match=r"report\.html cannot be written: Is a directory"):
            publish("new", part, output)

    assert output.read_text() == OLD


@pytest.mark.parametrize("error", [TraceError, OSError, KeyboardInterrupt])
def test_a_trace_that_cannot_be_read_leaves_the_old_page_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    output = tmp_path / "report.html"
    _write(output, OLD)

    with pytest.raises(error, match="of the trace"), reserved(output):
        raise error("of the trace")

    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert output.read_text() == OLD


def test_without_bokeh_it_is_bokeh_that_is_missing() -> None:
    code = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("bokeh", "numpy", "jinja2"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
try:
    from legacy_ddp.debug._page.page import write_page
except ModuleNotFoundError as error:
    print(error.name)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)

    assert done.stdout == "bokeh\n", done.stderr


# From traces to a page in one call


PLANTED = {(1, 3, "parameters", "parameter 'b'"): ("ff" * 8, 2.0)}


@pytest.mark.parametrize("runs, words", [(1, "✗ DIFFERENT"), (2, "✗ DIFFERENT"), (-2, "✓ SAME")])
def test_a_page_says_what_was_found(tmp_path: Path, runs: int, words: str) -> None:
    traces = [write_trace(tmp_path / "a", planted=PLANTED)]
    if runs != 1:
        traces.append(write_trace(tmp_path / "b", planted=PLANTED if runs < 0 else {}))

    write_page([open_run(trace) for trace in traces], tmp_path / "report.html")

    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    banner = re.search(r'<div class="banner \w+"><b>(.*?)</b>(.*?)</div>', page)
    assert banner is not None
    assert banner[1] == words
    assert ("parameter &#39;b&#39;" in banner[2]) == ("DIFFERENT" in words)
    assert "different:" not in banner[2]


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
