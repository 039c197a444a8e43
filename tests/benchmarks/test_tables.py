"""The tables of benchmarks/README.md: made from the results, and complete."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tables

from tests.helpers.paths import ROOT

RESULTS = {
    "results": {
        "2 ranks": {"fast": {"ratio": 1.005, "ends": [0.5, 2]}, "slow": {"ratio": 20.126, "ends": [3, 4]}},
        "4 ranks": {"fast": {"ratio": 1.25, "ends": [0.5, 2]}, "slow": {"ratio": 20.131, "ends": [3, 4]}},
        "verdict": "met",
    }
}
ROWS = {"the fast one": {"way": "fast"}, "the slow one": {"way": "slow"}}
RATIO = tables.Column("2 ranks", (("2 ranks", "{way}", "ratio"),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "some.json").write_text(json.dumps(RESULTS))
    return tmp_path


def _table(*columns: Any, file: str = "some.json", rows: dict[str, dict[str, str]] = ROWS) -> Any:
    return tables.Table(file, "times", columns, rows)


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_holds_what_the_results_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert tables.fill(text, tables.TABLES) == text, "run: python benchmarks/tables.py --write"


def test_every_table_stands_on_one_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)

    assert sorted(found["name"] for found in tables.MARKED.finditer(pages)) == sorted(tables.TABLES)


def test_a_row_has_its_label_and_the_numbers_at_its_places(folder: Path) -> None:
    ends = (("4 ranks", "{way}", "ends", "0"), ("4 ranks", "{way}", "ends", "1"))

    assert tables.render(_table(RATIO, tables.Column("ends", ends, "{:g} to {:g}")), folder) == (
        "| times | 2 ranks | ends |\n"
        "|---|---|---|\n"
        "| the fast one | 1.00 | 0.5 to 2 |\n"
        "| the slow one | 20.13 | 3 to 4 |\n"
    )


def test_a_range_goes_upwards_and_is_one_number_where_its_ends_are_written_alike(folder: Path) -> None:
    both = tuple((ranks, "{way}", "ratio") for ranks in ("4 ranks", "2 ranks"))

    told = tables.render(_table(tables.Column("ratio", both, is_range=True)), folder)

    assert told.splitlines()[2:] == ["| the fast one | 1.00 – 1.25 |", "| the slow one | 20.13 |"]  # noqa: RUF001


def test_rows_of_one_table_may_come_from_several_files(folder: Path) -> None:
    (folder / "other.json").write_text(json.dumps(RESULTS).replace("1.005", "9"))
    rows = {name: {"way": "fast", "name": name} for name in ("some", "other")}

    assert tables.render(_table(RATIO, file="{name}.json", rows=rows), folder).splitlines()[2:] == [
        "| some | 1.00 |",
        "| other | 9.00 |",
    ]


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
        tables.render(_table(tables.Column("x", (place,))), folder)

    assert said in str(caught.value)
    assert str(folder / "some.json") in str(caught.value)


def test_only_what_is_between_the_markers_changes(folder: Path) -> None:
    text = "before\n<!-- table: a -->\nold\n<!-- end -->\nbetween\n<!-- table: a -->\n<!-- end -->\nafter\n"
    table = _table(RATIO)
    block = "<!-- table: a -->\n" + tables.render(table, folder) + "<!-- end -->\n"

    filled = tables.fill(text, {"a": table}, folder)

    assert filled == f"before\n{block}between\n{block}after\n"
    assert tables.fill(filled, {"a": table}, folder) == filled


@pytest.mark.parametrize(
    "text,said",
    [
        ("<!-- table: b -->\n<!-- end -->\n", "no table is called 'b', expected one of a"),
        ("<!-- table: a -->\n| x |\n", "1 tables begin, but not each has its own <!-- end -->"),
        ("<!-- table: a -->\n<!-- table: a -->\n<!-- end -->\n", "2 tables begin, but not"),
    ],
)
def test_markers_that_are_wrong_are_an_error(folder: Path, text: str, said: str) -> None:
    with pytest.raises(tables.TableError, match=said):
        tables.fill(text, {"a": _table(RATIO)}, folder)


@pytest.mark.parametrize("count", [0, 2])
def test_a_table_that_does_not_stand_in_one_place_is_an_error(tmp_path: Path, count: int) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table: step -->\nold\n<!-- end -->\n" * count)

    with pytest.raises(tables.TableError, match=f"table 'step' stands in {count} places, expected 1"):
        tables.write([page], {"step": tables.TABLES["step"]})

    assert page.read_text().count("old") == count


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


def test_a_bar_of_a_chart_is_as_long_as_its_ratio_and_has_the_interval_of_the_median(tmp_path: Path) -> None:
    # 1.57 (0.6 - 0.2) / sqrt(4) on both sides of 0.5
    row = {"n": 4, "median_ms": 3.0, "median_ratio": 0.5, "ratio_quartiles": [0.2, 0.6]}
    one = {"n": 4, "median_ms": 6.0, "median_ratio": 1.0, "ratio_quartiles": [1.0, 1.0]}
    results = {"2 ranks": {"ours, off": row, "torch DDP": one, "neither": {**one, "median_ratio": 9.0}}}
    (tmp_path / "some.json").write_text(json.dumps({"results": results}))
    rows = {label: {"way": label} for label in results["2 ranks"]}
    column = tables.Column("2 ranks", (("2 ranks", "{way}", "median_ratio"),))

    groups = tables.chart_groups(tables.Table("some.json", "", [column], rows), tmp_path)
    svg = tables.draw("times", groups, tables.MODES["light"])

    assert [(group.kind, group.bars[0].text) for group in groups] == [
        ("legacy_ddp", "0.50"),
        ("torch DDP", "1.00"),
        ("other", "9.00"),
    ]
    lengths = [float(width) for width in re.findall(r'width="([\d.]+)" height="11"', svg)[3:]]
    full = lengths[2]  # cut at 2.5
    assert lengths == [pytest.approx(full * ratio / 2.5, abs=0.2) for ratio in (0.5, 1.0, 2.5)]
    assert svg.count(' z"') == 1  # the tip of the cut bar
    ((low, high),) = re.findall(r'd="M([\d.]+) [\d.]+ H([\d.]+)"', svg)
    assert float(high) - float(low) == pytest.approx(2 * 0.314 * full / 2.5, abs=0.2)
