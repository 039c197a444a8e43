"""The report page: content, escaping, the table of operations, and atomic replacement of the file."""

import os
import re
import stat
import sys
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import command, refusal
from tests.helpers.operations import changed, model, operation, recordable, rewritten
from tests.helpers.report import Shown, report, text_of, titled, write_report
from tests.helpers.traces import NAMES, call_facts, end_after, environment, write_trace

EVIL = "</script><script>alert(1)</script><img src=https://example.com/a.png>&\"'"
OLD = "<!DOCTYPE html>\n<!-- a report of legacy_ddp -->\nthe old one"
RANK = "rank-{:05d}.jsonl"
PLANTED = {(1, 3, "parameters", "parameter 'b'"): ("ff" * 8, 2.0)}


def _tags(page: Path) -> list[str]:
    """The tags of a page, without what its scripts and styles hold."""
    text = re.sub(r"(<(script|style)\b[^>]*>).*?</\2>", r"\1", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"<[a-z][^>]*>", text)


@pytest.mark.parametrize(
    "runs, kind, words", [(1, "different", "✗ DIFFERENT"), (2, "different", "✗ DIFFERENT"), (-2, "same", "✓ SAME")]
)
def test_the_verdict_is_text_and_not_by_colour_alone(tmp_path: Path, runs: int, kind: str, words: str) -> None:
    traces = [write_trace(tmp_path / "a", planted=PLANTED)]
    if runs != 1:
        traces.append(write_trace(tmp_path / "b", planted=PLANTED if runs < 0 else {}))

    page = write_report(tmp_path, *traces).read_text(encoding="utf-8")

    banner = re.search(r'<div class="banner (\w+)"><b>(.*?)</b>(.*?)</div>', page)
    assert banner is not None
    assert banner.groups()[:2] == (kind, words)
    assert ("parameter &#39;b&#39;" in banner[3]) == (kind == "different")
    assert f"{kind}:" not in banner[3]  # the word comes once
    assert f"<pre>{command('diff', *traces).stdout.rstrip()}</pre>" in page.replace("&#39;", "'")


def test_all_charts_are_there_with_their_words(tmp_path: Path) -> None:
    traces = write_trace(tmp_path / "a"), write_trace(tmp_path / "b")

    alone, both = report(tmp_path, traces[0]), report(tmp_path, *traces)

    of_ranks = "Local gradients: every rank's own norm, before the reduction"
    noise = "Gradient noise scale: the batch at which noise and signal are alike"
    reduced, waited = "Reduced gradients, by parameter and step", "Who waited for whom"
    assert [chart.title for chart in alone] == [reduced, of_ranks, waited, noise]
    of_both = "Difference of the two runs, by parameter and step"
    assert [chart.title for chart in both] == [of_both, of_ranks, f"{waited}: A", f"{waited}: B", noise]
    text = text_of(tmp_path / "report.html")
    for words in ("Report: a against b", "dashed lines: B", "larger of two differences: that of the reduced gradient"):
        assert words in text
    assert "Ranks are compared each with its own." in text


def _only_environments(folder: Path, *ranks: int) -> Path:
    """A run of two ranks of which some were killed before they recorded their start."""
    write_trace(folder)
    for rank in ranks:
        end_after(folder / RANK.format(rank), None)
    return folder


@pytest.mark.parametrize("ranks, others", [((0,), None), ((0, 1), None), ((0, 1), ())])
def test_a_rank_that_recorded_nothing_leaves_a_page_that_says_so(
    tmp_path: Path, ranks: tuple[int, ...], others: tuple[int, ...] | None
) -> None:
    traces = [_only_environments(tmp_path / "a", *ranks)]
    if others is not None:
        traces.append(_only_environments(tmp_path / "b", *others))

    text = text_of(write_report(tmp_path, *traces))

    assert "? CANNOT TELL" in text
    no_norms = "Left out: no finite norm of a local gradient is in the trace."
    assert (no_norms in text) == (len(ranks) == 2 and others is None)


def test_norms_whose_squares_or_sums_no_float64_holds_are_shown(tmp_path: Path) -> None:
    planted = {
        (rank, step, phase, name): (f"{step:016x}", 1.7e308)
        for rank in (0, 1)
        for step in range(1, 6)
        for phase in ("reduced_gradients", "parameters")
        for name in NAMES[phase]
    }
    run = write_trace(tmp_path / "a", planted=planted, calls=lambda *at: call_facts(*at, local_norm=1.7e308))

    charts = report(tmp_path, run)

    assert "have a finite norm in the trace" in titled(charts, "Gradient noise scale").captions[0]  # it needs squares
    assert titled(charts, "Local gradients").lines[0][1] == [1.7e308] * 5
    assert charts[0].cell("'a'", "2") == (1.7e308, "")


def test_what_comes_from_a_trace_is_escaped_wherever_it_shows_and_the_page_asks_for_nothing(tmp_path: Path) -> None:
    names = {
        **NAMES,
        "reduced_gradients": (f"gradient of {EVIL!r}", "gradient of 'b'"),
        "parameters": (f"parameter {EVIL!r}", "parameter 'b'"),
    }

    def evil(rank: int, size: int) -> Any:
        return environment(rank, size, facts={EVIL: EVIL}, started=EVIL, layout=EVIL)

    run = write_trace(tmp_path / "a", names=names, environments=evil, end=EVIL)
    path = write_report(tmp_path, run)
    page, tags, text = path.read_text(encoding="utf-8"), _tags(path), text_of(path)
    plain = _tags(write_report(tmp_path, write_trace(tmp_path / "plain")))

    assert f"{EVIL} {EVIL}" in text  # a fact
    assert [tag for tag in tags if tag.startswith("<script")] == [tag for tag in plain if tag.startswith("<script")]
    assert "<script>alert" not in page
    assert "<img src" not in page
    (policy,) = [tag for tag in tags if "Content-Security-Policy" in tag]
    assert "content=\"default-src 'none';" in policy
    assert "//" not in policy
    assert [tag for tag in tags if tag.startswith("<img") or " src=" in tag] == []
    assert {*re.findall(r' href="(.*?)"', "".join(tags))} <= {"data:,"}


def test_facts_that_differ_between_runs_are_marked_in_words(tmp_path: Path) -> None:
    facts = {"a": {"torch": "2.13", "threads": "1", "seed": "0"}, "b": {"torch": "2.13", "threads": "2"}}
    traces = [
        write_trace(
            tmp_path / name, environments=lambda rank, size, held=held: environment(rank, size, facts=held), end=end
        )
        for (name, held), end in zip(facts.items(), ("closed", None), strict=True)
    ]

    text = text_of(write_report(tmp_path, *traces))

    assert "torch 2.13 2.13 threads 1 2 runs differ seed 0 nothing runs differ" in text
    assert "end of the trace closed no last line: killed, still running, or recorder stopped runs differ" in text
    assert "3 of 10 lines differ" in text


def test_facts_that_differ_between_ranks_are_marked_with_whose_they_are_and_many_are_cut(tmp_path: Path) -> None:
    def environments(rank: int, size: int) -> Any:
        facts = {"host": "ab"[rank == 2], "pid": str(100 + rank)}
        return environment(rank, size, facts=facts, started=str(rank))

    text = text_of(write_report(tmp_path, write_trace(tmp_path / "a", world_size=9, environments=environments)))

    assert "host ranks 0-1, 3-8: a; rank 2: b ranks differ" in text
    assert "rank 5: 105; 3 more values ranks differ" in text
    assert "2 of 9 lines differ" in text  # not when ranks started


def test_steps_that_only_another_rank_has_are_shown_too(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "a", steps=801, names={}, end=None)
    lines = (run / RANK.format(0)).read_bytes().splitlines(keepends=True)
    (run / RANK.format(0)).write_bytes(b"".join(lines[:300]))

    charts = report(tmp_path, run)

    assert "Each column stands for 3 steps and shows the longest wait." in titled(charts, "Who waited").captions
    assert charts[0].captions == ["Left out: the trace holds neither reduced gradients nor parameters."]


def test_what_cannot_be_shown_is_left_out_with_a_reason(tmp_path: Path) -> None:
    run = write_trace(tmp_path / "a", world_size=1, calls=lambda *at: call_facts(*at, local_norm=None))
    text = text_of(write_report(tmp_path, run))

    assert "Left out: it compares ranks, and there is only one." in text
    assert "Left out: a single rank waits for no other rank." in text
    assert "Left out: no finite norm of a local gradient is in the trace." in text


def test_a_trace_that_ends_at_its_start_is_a_page_all_the_same(tmp_path: Path) -> None:
    charts = report(tmp_path, write_trace(tmp_path / "a", steps=0))

    assert titled(charts, "Who waited").captions == ["Left out: no call is in the trace."]
    assert charts[0].columns == ["start"]


def _refused(output: Path, *traces: Path) -> str:
    return refusal("report", *traces, "-o", output)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "a", steps=1, names={})


def test_a_page_of_ours_or_an_empty_file_is_replaced_with_usual_rights_and_nothing_else_is_left_there(
    tmp_path: Path, trace: Path
) -> None:
    output = tmp_path / "report.html"
    for before in ("", OLD):
        output.write_text(before)
        write_report(tmp_path, trace)
        assert "Report: a" in text_of(output)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "report.html"]
    (tmp_path / "other").touch()
    assert output.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_file_that_is_no_page_of_ours_is_not_touched(tmp_path: Path, trace: Path) -> None:
    output, content = tmp_path / "notes", "<!DOCTYPE html>\n<html>"
    output.write_text(content)

    told = _refused(output, trace)

    assert told == f"{output} exists and is no report; name another place with -o, or remove it"
    assert output.read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "notes"]


def test_a_place_that_holds_no_file_or_cannot_be_written_is_one_clear_line(tmp_path: Path, trace: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()

    for output in (tmp_path, tmp_path / "pipe"):
        assert _refused(output, trace).startswith(f"{output} is no file, expected a place for a page; name another one")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    nowhere, inside = tmp_path / "none" / "report.html", tmp_path / "file" / "report.html"
    assert _refused(nowhere, trace).startswith(f"{nowhere} cannot be written: No such file or directory; name")
    assert _refused(inside, trace).startswith(f"{inside} cannot be written: Not a directory; name")


def test_a_page_that_cannot_be_made_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    output = tmp_path / "report.html"
    output.write_text(OLD)
    other = write_trace(tmp_path / "b", kind="float32 (9,)")
    same = write_trace(tmp_path / "c")

    assert "hold other parameters" in _refused(output, other, same)  # found while runs are compared
    monkeypatch.setattr(os, "replace", fail)
    assert "report.html cannot be written: No space left on device; name another" in _refused(output, trace)

    assert output.read_text() == OLD
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "report.html"]


def test_a_parameter_that_only_rank_1_has_does_not_end_the_page_in_a_key_error(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "a", world_size=2, steps=3)
    more = {**NAMES, "parameters": ("parameter 'a'", "parameter 'b'", "parameter 'c'")}
    other = write_trace(tmp_path / "b", world_size=2, steps=3, names=more)
    (other / RANK.format(1)).replace(folder / RANK.format(1))

    assert "✗ DIFFERENT" in text_of(write_report(tmp_path, folder))


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
def test_a_trace_and_a_page_whose_names_are_no_utf_8_are_written_with_escapes(tmp_path: Path) -> None:
    names = {**NAMES, "parameters": ("parameter 'a'", "parameter \ud800")}
    folder = write_trace(
        tmp_path / "a\udcff", names=names, planted={(1, 3, "parameters", "parameter \ud800"): ("ff" * 8, 2.0)}
    )
    output = tmp_path / "b\udcfe.html"

    assert command("report", folder, "-o", output).returncode == 0

    page = output.read_text(encoding="utf-8")
    assert rf"trace: {tmp_path}/a\udcff" in page
    assert r"parameter \ud800" in page


LONG = ".".join(f"a_module_with_a_long_name_{index}" for index in range(30))
HEADER = ("", "A", "B", "stage", "module", "operation", "comparison")


def _traces(folder: Path, *sides: Sequence[Any], threads: tuple[str, str] = ("1", "1")) -> list[Path]:
    """Runs of one rank with these operations in step 3, where the local gradients part."""
    return [
        write_trace(
            folder / name,
            world_size=1,
            steps=3,
            operations=lambda step, _, side=side: recordable(side) if step == 3 else (),
            planted={(0, 3, "local_gradients", "gradient of 'a'"): (digest * 16, 1.0)},
            environments=lambda rank, size, count=count: environment(rank, size, facts={"threads": count}),
        )
        for name, side, digest, count in zip("ab", sides, "ef", threads, strict=True)
    ]


def _wrong_product(module: str = "2", position: int = 7) -> tuple[list[Any], list[Any]]:
    step = changed(model(), position, module=module)
    return step, rewritten(step, position, step[position].outputs[0].digest or "", "wrong")


def _table(folder: Path, *sides: Sequence[Any]) -> Shown:
    return titled(report(folder, *_traces(folder, *sides)), "Operations of step 3")


def test_the_first_difference_has_a_mark_of_its_own_and_what_follows_is_said_to_follow(tmp_path: Path) -> None:
    table = _table(tmp_path, *_wrong_product())

    assert table.table[0] == HEADER
    marked = [row for row in table.table if row[0]]
    assert marked == [("▶", "8", "8", "forward", "2", "aten::mm", "inputs agree, output differs")]
    assert "After the first difference, operations with other inputs follow from a difference" in table.captions[-1]


def test_rows_that_agree_are_not_said_to_follow_from_the_difference(tmp_path: Path) -> None:
    step = model()
    table = _table(tmp_path, step, [*step[:2], operation("clone", ["h0(x)"], ["h0(x)"]), *step[2:]])

    assert table.captions[-1].endswith("16 in A, 17 in B.")


def test_causes_and_operations_stand_before_the_long_list_of_the_page_and_names_are_text(tmp_path: Path) -> None:
    traces = _traces(tmp_path, *_wrong_product(module=EVIL), threads=("1", "4"))
    text = write_report(tmp_path, *traces).read_text(encoding="utf-8")

    parts = (
        "may explain it</h2>",
        "<td>1 in A, 4 in B</td>",
        "Operations of step 3",
        "Meaning: Other kernel, or another order of its sums: threads 1 in A, 4 in B.",
        "<pre>",
        "Difference of the two runs, by parameter and step</h2>",
    )
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert EVIL not in text
    assert f"<td>{EVIL}</td>" in unescape(text)


def test_many_causes_are_cut(tmp_path: Path) -> None:
    traces = [
        write_trace(
            tmp_path / name,
            environments=lambda *at, name=name: environment(*at, facts={f"fact {n}": name for n in range(33)}),
            planted={(0, 3, "parameters", "parameter 'a'"): (name * 16, 1.0)},
        )
        for name in "ab"
    ]

    causes = titled(report(tmp_path, *traces), "What differs around the training")

    assert len(causes.table) + int(causes.captions[0].split()[0]) == 1 + 33
    assert causes.captions[0].endswith(" more rows are left out.")


def test_the_table_stays_small(tmp_path: Path) -> None:
    extra = [operation("mul", [f"e{i}"], [f"e{i + 1}"], module=LONG) for i in range(2_000)]
    traces = _traces(tmp_path, model(), [*model()[:4], *extra, *model()[4:]])

    page = write_report(tmp_path, *traces).read_text(encoding="utf-8")

    assert 0 < page.count(LONG) < 50
