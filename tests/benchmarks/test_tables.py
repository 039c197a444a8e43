"""The tables of benchmarks/README.md: made from the results, and complete."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tables

from tests.helpers.paths import ROOT

RESULTS = {"results": {"2 ranks": {"fast": {"ratio": 1.005, "ends": [0.5, 2]}}, "verdict": "met"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "some.json").write_text(json.dumps(RESULTS))
    return tmp_path


def _table(*place: str) -> Any:
    """A table of one number."""
    return tables.Table("some.json", "times", (tables.Column("x", (place,)),), {"the fast one": {"way": "fast"}})


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_holds_what_the_results_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert tables.fill(text, tables.TABLES) == text, "run: python benchmarks/tables.py --write"


def test_every_table_stands_on_one_page_and_every_figure_on_one_or_more() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)

    assert sorted(found["name"] for found in tables.MARKED.finditer(pages)) == sorted(tables.TABLES)
    assert {found["name"] for found in tables.FIGURE.finditer(pages)} == set(tables.FIGURES)


@pytest.mark.parametrize(
    "place,said",
    [
        (("2 ranks", "{way}", "mean"), "no number at results / 2 ranks / fast / mean: 'mean' is not there"),
        (("2 ranks", "{way}", "ends", "2"), "no number at results / 2 ranks / fast / ends / 2: '2' is not there"),
        (("2 ranks", "{way}", "ratio", "x"), "'x' is not there"),
        (("verdict",), "no number at results / verdict: got 'met'"),
    ],
)
def test_a_missing_number_is_an_error_that_names_file_and_place(folder: Path, place: Any, said: str) -> None:
    with pytest.raises(tables.TableError) as caught:
        tables.render(_table(*place), folder)

    assert said in str(caught.value)
    assert str(folder / "some.json") in str(caught.value)


@pytest.mark.parametrize(
    "text,said",
    [
        ("<!-- table: b -->\n<!-- end -->\n", "no table is called 'b', expected one of a"),
        ("<!-- table: a -->\n| x |\n", "1 tables begin, but not each has its own <!-- end -->"),
        ("<!-- table: a -->\n<!-- table: a -->\n<!-- end -->\n", "2 tables begin, but not"),
        ("takes <!-- figure: b -->1<!-- end --> ms", "no figure is called 'b', expected one of a"),
        ("takes\n<!-- figure: a -->1<!-- end --> ms", "the marker of figure 'a' begins a line"),
        ("- takes\n  <!-- figure: a -->1<!-- end --> ms", "the marker of figure 'a' begins a line"),
        ("takes <!-- figure: a -->1 ms\n<!-- end -->", "1 figures begin, but not each has its own <!-- end -->"),
    ],
)
def test_markers_that_are_wrong_are_an_error(folder: Path, text: str, said: str) -> None:
    figure = tables.Column("", (("2 ranks", "fast", "ratio"),), file="some.json")

    with pytest.raises(tables.TableError, match=said):
        tables.fill(text, {"a": _table("2 ranks", "{way}", "ratio")}, folder, figures={"a": figure})


def test_the_charts_are_those_of_the_results_and_stand_beside_their_tables() -> None:
    files = tables.chart_files()
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")

    assert set(tables.CHARTS_FOLDER.glob("*.svg")) == set(files)
    for path, text in files.items():
        assert path.read_text(encoding="utf-8") == text, "run: python benchmarks/tables.py --write"
    for name in tables.CHARTS:
        image = f"../docs/static/charts/{name.replace(' ', '-')}-light.svg"
        assert re.search(rf"!\[[^]]+\]\({image}\)\n\n<!-- table: {name} -->", page)
    assert "](static/charts/header-growth-light.svg)" in (ROOT / "docs" / "multi-host.md").read_text(encoding="utf-8")
