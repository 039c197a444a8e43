"""The page in a browser: drawing, hover texts, narrow windows and network requests."""

import os
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from selenium import webdriver

from tests.helpers.browser import Page, open_browser, reason_missing
from tests.helpers.operations import changed, model, recordable, rewritten
from tests.helpers.report import write_report
from tests.helpers.traces import NAMES, call_facts, environment, write_trace

needs_browser = pytest.mark.skipif(reason_missing() is not None, reason=str(reason_missing()))
EVIL = "<script>document.title='owned'</script><img src=https://example.com/a.png onerror=document.title='owned'>$$x$$"
HOVERED = "layers.3.weight"
LONG = ".".join(f"a_module_with_a_long_name_{index}" for index in range(30))
CHARTS = 4
TRIANGLES = 24 / (130 + 24)  # two lines of them, of 12 pixels each, above rows that would take 130 without
# The frames of the charts, where they are in the window: left, top, width, height.
FRAMES = """
return Bokeh.documents[0].roots().map(root => {
  const view = Bokeh.index.get_by_id ? Bokeh.index.get_by_id(root.id) : Bokeh.index[root.id]
  const box = view.el.getBoundingClientRect()
  const frame = view.frame.bbox
  return [box.left + frame.left, box.top + frame.top, frame.width, frame.height]
})
"""
TOOLTIP = """
const tips = found.filter(element => element.classList.contains("bk-Tooltip"))
const shown = tips.filter(tip => tip.getBoundingClientRect().width > 0)
const text = shown.map(tip => [...(tip.shadowRoot || tip).querySelectorAll("*")].map(
  part => part.children.length ? "" : part.textContent).join(" ")).join(" ").trim()
return arguments[0].every(part => text.includes(part)) ? text : null
"""
# The cells of the marked row in the table of operations: for each its text and width, and the width of its last word on
# one line.
MARKED = """
const rows = [...document.querySelectorAll("section table")].flatMap(table => [...table.rows])
return [...rows.find(row => row.cells[0].innerText == "▶").cells].map(cell => {
  const probe = document.createElement("span")
  const text = cell.innerText
  probe.style.whiteSpace = "nowrap"
  probe.textContent = text.split(" ").pop()
  cell.append(probe)
  const width = probe.getBoundingClientRect().width
  probe.remove()
  return [text, cell.getBoundingClientRect().width, width]
})
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    with open_browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the number of runs."""
    return {runs: _page(tmp_path_factory.mktemp("page"), runs) for runs in (1, 2)}


def _page(folder: Path, runs: int) -> Path:
    """A page about two ranks that differ from step 7 on, and names with markup. Two runs differ from step 4 on."""
    step = changed(model(), 7, module=LONG)
    operations = [rewritten(step, 7, step[7].outputs[0].digest or "", "wrong"), step]
    parameters = ("a.bias", HOVERED, EVIL)
    names = {
        **NAMES,
        "reduced_gradients": tuple(f"gradient of {name!r}" for name in parameters),
        "parameters": tuple(f"parameter {name!r}" for name in parameters),
    }
    planted = {
        (1, 7, "parameters", f"parameter {HOVERED!r}"): ("ff" * 8, 9.0),
        (1, 8, "parameters", f"parameter {HOVERED!r}"): ("ff" * 8, 3.0),  # the norm of the other rank
        (0, 12, "reduced_gradients", "gradient of 'a.bias'"): ("dd" * 8, 0.0),
        (1, 12, "reduced_gradients", "gradient of 'a.bias'"): ("dd" * 8, 0.0),
        (0, 4, "reduced_gradients", f"gradient of {HOVERED!r}"): ("ee" * 8, 0.25, 3),
        (1, 4, "reduced_gradients", f"gradient of {HOVERED!r}"): ("ee" * 8, 0.25, 3),
    }
    traces = [
        write_trace(
            folder / f"run-{number}",
            steps=20,
            names=names,
            planted=planted if number == 0 else {},
            environments=lambda rank, size: environment(rank, size, facts={EVIL: EVIL}, parameters=parameters),
            # A large one over few items, so that there is a noise scale.
            calls=lambda step, rank: call_facts(step, rank, local_norm=400.0 + 3 * rank + step % 3),
            operations=lambda step, _, number=number: recordable(operations[number]) if step == 4 else (),
        )
        for number in range(runs)
    ]
    return write_report(folder, *traces)


def _in_cell(step: int, row: int) -> tuple[float, float]:
    """A place in a cell of the first chart, right and above of its middle, in shares of the frame."""
    return (step + 0.75) / 21, TRIANGLES + (row + 0.25) / 3 * (1 - TRIANGLES)


@needs_browser
@pytest.mark.parametrize("runs, charts", [(1, CHARTS), (2, CHARTS + 1)])
def test_every_chart_is_drawn_and_nobody_is_asked_for_anything(
    driver: webdriver.Chrome, pages: dict[int, Path], runs: int, charts: int
) -> None:
    page = Page(driver, pages[runs])
    frames = page.run(FRAMES)
    # Several colours in the middle of each frame: something was drawn there.
    canvases = page.run(
        "return found.filter(element => element.tagName == 'CANVAS')"
        ".map(canvas => [canvas.width, canvas.height, new Set(new Uint32Array("
        "canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size])"
    )

    assert len(frames) == charts
    assert all(width > 500 and height >= 100 for _, _, width, height in frames), frames
    assert len([size for size in canvases if size[0] > 500 and size[1] > 100 and size[2] > 10]) >= charts, canvases
    assert len({(left, width) for left, _, width, _ in frames}) == 1, "a step is not in the same place in all charts"
    assert page.console_errors() == []
    assert page.requests() == [page.url]
    assert page.run("return performance.getEntriesByType('resource').map(entry => entry.name)") == []
    page.run("Bokeh.documents[0].roots()[1].x_range.setv({start: 3, end: 9})")
    ranges = page.run("return Bokeh.documents[0].roots().map(root => [root.x_range.start, root.x_range.end])")
    assert ranges == [[3, 9]] * charts, "panning one chart pans all"


def _scroll_to(page: Page, chart: int) -> None:
    page.run(
        "document.querySelectorAll('.chart')[arguments[0]].closest('section').scrollIntoView({block: 'center'})", chart
    )
    page.wait_for("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")


def _point_at(page: Page, chart: int, across: float, down: float) -> None:
    """Move to a place in the frame of a chart, given in shares of its width and height."""
    _scroll_to(page, chart)
    left, top, width, height = page.run(FRAMES)[chart]
    page.point(left + 5, top + 5)
    page.point(left + across * width, top + down * height)


@needs_browser
def test_the_pointer_shows_the_parameter_under_it_and_names_from_a_trace_are_text(
    driver: webdriver.Chrome, pages: dict[int, Path]
) -> None:
    page = Page(driver, pages[1])
    for step, row, expected in (
        (4, 1, [HOVERED, "4", "0.25", "3 non-finite elements"]),
        (7, 1, [HOVERED, "7", "2.875", "ranks differ"]),
        (9, 0, ["a.bias", "9", "2.125", "nothing to note"]),
        (9, 2, [EVIL, "4.125"]),
        (0, 0, ["a.bias", "start", "none", "no gradient"]),
    ):
        _point_at(page, 0, *_in_cell(step, row))
        shown = page.wait_for(TOOLTIP, expected)
        assert all(part in shown for part in expected), shown
    _point_at(page, 2, 10.5 / 21, 0.75)
    assert page.wait_for(TOOLTIP, ["rank 1", "10, waiting for rank 0", "0.01"])

    assert page.run("return document.title") == "Report: run-0"
    assert page.run("return found.filter(element => element.tagName == 'IMG').length") == 0
    assert EVIL in page.run("return document.querySelector('details').textContent")
    assert page.console_errors() == []


BLACK, RED, WHITE, GREY, SKY = (0, 0, 0), (213, 94, 0), (255, 255, 255), (232, 232, 232), (86, 180, 233)


@needs_browser
@pytest.mark.parametrize(
    "runs, colours",
    [
        (1, {(4, 1): BLACK, (7, 1): RED, (8, 1): RED, (0, 0): WHITE, (12, 0): GREY}),
        (2, {(4, 1): BLACK, (8, 1): SKY, (0, 0): GREY, (9, 0): GREY}),
    ],
)
def test_what_stands_out_has_a_colour_of_its_own(
    driver: webdriver.Chrome, pages: dict[int, Path], runs: int, colours: dict[tuple[int, int], tuple[int, int, int]]
) -> None:
    page = Page(driver, pages[runs])
    _scroll_to(page, 0)
    left, top, width, height = page.run(FRAMES)[0]
    with Image.open(BytesIO(driver.get_screenshot_as_png())) as picture:
        seen = picture.convert("RGB")

    def colour(across: float, down: float) -> object:
        return seen.getpixel((round(left + across * width), round(top + down * height)))

    assert {cell: colour(*_in_cell(*cell)) for cell in colours} == colours
    assert colour(7.5 / 21, TRIANGLES * 3 / 4) == RED  # something differs
    assert colour(4.5 / 21, TRIANGLES / 4) == BLACK  # something is not finite
    assert colour(9.5 / 21, TRIANGLES * 3 / 4) == WHITE


@needs_browser
@pytest.mark.parametrize("width, least", [(800, 400), (390, 150)])
def test_the_page_and_whole_charts_and_tables_with_long_names_fit_a_narrow_window(
    driver: webdriver.Chrome, pages: dict[int, Path], width: int, least: int
) -> None:
    page = Page(driver, pages[2])
    page.set_width(width)
    sections = "document.querySelectorAll('section:has(.chart)')"
    page.wait_for(f"return [...{sections}].every(part => part.scrollWidth <= part.clientWidth) || null")
    frames, cells = page.run(FRAMES), page.run(MARKED)
    is_whole = page.run("return document.documentElement.scrollWidth <= window.innerWidth")
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    assert len({(left, frame_width) for left, _, frame_width, _ in frames}) == 1, frames
    assert all(left > 0 and frame_width > least for left, _, frame_width, _ in frames), frames
    texts = "▶", "8", "8", "forward", LONG, "aten::mm", "inputs agree, output differs"
    assert [text for text, *_ in cells] == [*texts]
    assert is_whole
    assert width < 800 or all(cells[at][1] >= cells[at][2] for at in (3, 5, 6)), cells  # no word is broken
    assert page.console_errors() == []


@pytest.mark.skipif(not os.environ.get("CI"), reason="is for CI")
def test_ci_has_a_browser() -> None:
    assert reason_missing() is None
