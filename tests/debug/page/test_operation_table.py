"""The table of operations on the page: content, marks without colour, long names, and the size of the page."""

from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from selenium import webdriver

from legacy_ddp._text import MAX_LINES
from legacy_ddp.debug._diff.operations import MAX_FIRST, ROWS_AFTER, ROWS_BEFORE, finding
from legacy_ddp.debug._diff.result import Cause, Comparison, OperationFinding
from legacy_ddp.debug._operations.align import first_difference
from legacy_ddp.debug._operations.operation import Operation
from legacy_ddp.debug._page.page import cause_table, operation_table, render
from legacy_ddp.debug._trace.read import open_run
from tests.helpers.browser import Page, open_browser, reason_missing
from tests.helpers.operations import changed, model, numbered, operation, rewritten
from tests.helpers.traces import write_trace

needs_browser = pytest.mark.skipif(reason_missing() is not None, reason=str(reason_missing()))
LONG = ".".join(f"a_module_with_a_long_name_{index}" for index in range(30))
EVIL = "<img src=https://example.com/a.png>"
# The texts of the cells of the first table.
CELLS = """
return [...document.querySelector("section table").rows].map(row => [...row.cells].map(cell => cell.innerText))
"""
# The width of the cell, and of a word in it on one line, for three cells of the marked row.
WIDTHS = """
const row = [...document.querySelector("section table").rows].find(row => row.cells[0].innerText == "▶")
const widthOf = (cell, word) => {
  const probe = document.createElement("span")
  probe.style.whiteSpace = "nowrap"
  probe.textContent = word
  cell.append(probe)
  const width = probe.getBoundingClientRect().width
  probe.remove()
  return width
}
return [[3, "forward"], [5, "aten::mm"], [6, "differs"]].map(([index, word]) =>
  [row.cells[index].getBoundingClientRect().width, widthOf(row.cells[index], word)])
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    with open_browser(width=800) as driver:
        yield driver


def found(module: str = "2", position: int = 7) -> OperationFinding:
    """A wrong product in a module."""
    step = changed(model(), position, module=module)
    other = rewritten(step, position, step[position].outputs[0].digest or "", "wrong")
    return between(step, other)


def between(a: list[Operation], b: list[Operation], ranks: tuple[int, ...] = (1,)) -> OperationFinding:
    sides = numbered(a), numbered(b)
    difference = first_difference(*sides)
    assert difference is not None
    return finding(41, sides, difference, ranks=ranks, facts={})


def page(folder: Path, operations: OperationFinding | None, causes: tuple[Cause, ...] = ()) -> Path:
    runs = [open_run(write_trace(folder / name)) for name in ("a", "b")]
    comparison = Comparison(("a", "b"), "different", "different: somewhere", operations=operations, causes=causes)
    path = folder / "report.html"
    path.write_text(render(runs, comparison, ["the text"]), encoding="utf-8")
    return path


def test_the_first_difference_has_a_mark_of_its_own() -> None:
    (chart,) = operation_table(found())

    assert chart.title == "Operations of step 41 on rank 1"
    assert chart.table[0] == ("", "A", "B", "stage", "module", "operation", "comparison")
    marked = [row for row in chart.table if row[0]]
    assert marked == [("▶", "8", "8", "forward", "2", "aten::mm", "inputs agree, output differs")]


def test_rows_that_agree_are_not_said_to_follow_from_the_difference() -> None:
    step = model()
    harmless = between(step, [*step[:2], operation("clone", ["h0(x)"], ["h0(x)"]), *step[2:]])

    captions = ["".join(chart.captions) for of in (found(), harmless) for chart in operation_table(of)]

    assert "After the first difference, operations with other inputs follow from a difference" in captions[0]
    assert "After the first difference" not in captions[1]
    assert captions[1].endswith("16 in A, 17 in B.")


def test_without_a_difference_there_is_no_table() -> None:
    assert [*operation_table(None)] == []


def test_causes_and_operations_stand_before_the_long_list_of_the_page(tmp_path: Path) -> None:
    cause = Cause("threads", (("A", "1"), ("B", "4")), "first at step 7 on rank 1")

    text = page(tmp_path, found(), (cause,)).read_text(encoding="utf-8")

    parts = (
        *("may explain it</h2>", "<td>threads, first at step 7 on rank 1</td><td>1 in A, 4 in B</td>"),
        *("Operations of step 41", "Meaning: The same kernel gave another result", "<pre>the text</pre>"),
        "Difference of the two runs, by parameter and step</h2>",
    )
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_many_causes_are_cut() -> None:
    causes = [Cause(f"fact {number}", (("A", "1"), ("B", "2"))) for number in range(MAX_LINES + 3)]

    (chart,) = cause_table(causes)

    assert len(chart.table) == 1 + MAX_LINES
    assert chart.captions == ("3 more rows are left out.",)
    assert [*cause_table(())] == []


def test_the_table_stays_small(tmp_path: Path) -> None:
    extra = [operation("mul", [f"e{i}"], [f"e{i + 1}"], module=LONG) for i in range(20_000)]
    many = between(model(), [*model()[:4], *extra, *model()[4:]], ranks=())

    (chart,) = operation_table(many)

    assert len(chart.table) <= 1 + ROWS_BEFORE + MAX_FIRST + ROWS_AFTER
    with_table, without = (page(tmp_path / name, held).stat().st_size for name, held in (("a", many), ("b", None)))
    assert 0 < with_table - without < 40_000


def test_names_are_text_and_no_part_of_the_page(tmp_path: Path) -> None:
    text = page(tmp_path, found(module=EVIL)).read_text(encoding="utf-8")

    assert EVIL not in text
    assert f"<td>{EVIL}</td>" in unescape(text)


@needs_browser
def test_the_table_fits_a_narrow_window_with_long_names(driver: webdriver.Chrome, tmp_path: Path) -> None:
    shown = Page(driver, page(tmp_path, found(module=LONG)))

    rows = shown.run(CELLS)

    assert rows[0] == ["", "A", "B", "stage", "module", "operation", "comparison"]
    assert [row for row in rows if row[0] == "▶"] == [
        ["▶", "8", "8", "forward", LONG, "aten::mm", "inputs agree, output differs"]
    ]
    assert shown.run("return document.documentElement.scrollWidth <= window.innerWidth")
    assert shown.console_errors() == []
    assert shown.requests() == [shown.url]


@needs_browser
def test_words_of_a_comparison_are_not_broken_by_long_names(driver: webdriver.Chrome, tmp_path: Path) -> None:
    shown = Page(driver, page(tmp_path, found(module=LONG)))

    widths = shown.run(WIDTHS)

    assert all(cell >= word for cell, word in widths), widths
