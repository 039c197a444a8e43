"""Tables and figures quoted in the documentation, made from benchmarks/results/, so that no figure drifts.

    python benchmarks/tables.py            # print all tables and figures
    python benchmarks/tables.py --write    # write them between their markers in the pages, and draw the charts

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, a figure inside a sentence between
`<!-- figure: NAME -->` and `<!-- end -->`, on one line that begins with something else: Markdown ends a paragraph at a
line that begins with a comment. To add one, add it to TABLES in _quoted.py or to FIGURES in _quoted_figures.py and put
the markers into a page. After a new measurement: write, and check the prose around the figures.

A table in CHARTS has a chart of its ratios in docs/static/charts/, one file for light and one for dark pages. The chart
of HEADER_GROWTH is on docs/multi-host.md.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from _charts import KINDS, MODES, Bar, Curve, Group, Mode, draw, draw_growth
from _quoted import TABLES
from _quoted_figures import FIGURES
from _quoted_growth import HEADERS
from _results import Timed
from _table import Column, Place, Table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CHARTS_FOLDER = ROOT / "docs" / "static" / "charts"
# Headings: that of a table is too long.
CHARTS: Mapping[str, str] = MappingProxyType(
    {
        "step": "A step of a transformer, 2 ranks: torch DDP is 1",
        "call": "A call of a transformer: a bare all_reduce is 1",
        "hosts of two": "A step over two hosts, 1 Gbit/s: torch DDP is 1",
        "others": "A step of other models, 2 ranks: torch DDP is 1",
        "crowded": "A step of 4 ranks on 2 cores: torch DDP is 1",
    }
)
HEADER_GROWTH = "Exchange of the headers of a call"
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
MARKED = re.compile(r"(<!-- table: (?P<name>.*?) -->\n)(?P<table>.*?)(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"(?P<begin>^[ \t]*)?(<!-- figure: (?P<name>.*?) -->)(?P<figure>.*?)(<!-- end -->)", re.MULTILINE)


class TableError(Exception):
    """The text names the missing table, file or place."""


def main(given: Sequence[str] | None = None) -> None:
    """Print all tables, or write them into the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the pages, and tell which changed")
    arguments = parser.parse_args(given)
    try:
        if arguments.write:
            changed = [*write(PAGES), *write_charts()]
            print("\n".join(f"changed {path.relative_to(ROOT)}" for path in changed) or "nothing changed")
        else:
            print("\n".join(f"{name}\n\n{render(table)}" for name, table in TABLES.items()))
            print("\n".join(f"{name}: {render_figure(figure)}" for name, figure in FIGURES.items()))
    except TableError as error:
        sys.exit(str(error))


def render(table: Table, folder: Path = RESULTS) -> str:
    """The table in Markdown.

    Raises:
        TableError: a file or a number is missing.
    """
    lines = [[table.heading, *(column.title for column in table.columns)], ["---"] * (1 + len(table.columns))]
    for label, blanks in table.rows.items():
        paths = [folder / (column.file or table.file).format_map(blanks) for column in table.columns]
        cells = [_cell(column, blanks, path) for column, path in zip(table.columns, paths, strict=True)]
        lines.append([label, *cells])
    return "".join(_line(cells) for cells in lines)


def render_figure(figure: Column, folder: Path = RESULTS) -> str:
    """The figure as it stands in a sentence.

    Raises:
        TableError: a file or a number is missing.
    """
    return _cell(figure, {}, folder / figure.file)


def fill(
    text: str, tables: Mapping[str, Table], folder: Path = RESULTS, *, figures: Mapping[str, Column] = FIGURES
) -> str:
    """``text`` with every marked table and figure replaced.

    Raises:
        TableError: as :func:`render`; or a marker names nothing, has no end, or begins a line.
    """

    def replace(found: re.Match[str]) -> str:
        if found["name"] not in tables:
            raise TableError(f"no table is called {found['name']!r}, expected one of {', '.join(tables)}")
        return found[1] + render(tables[found["name"]], folder) + found[4]

    begun, ended = text.count("<!-- table: "), len(MARKED.findall(text))
    if begun != ended or any("<!-- table: " in found["table"] for found in MARKED.finditer(text)):
        raise TableError(f"{begun} tables begin, but not each has its own <!-- end -->")
    return _fill_figures(MARKED.sub(replace, text), figures, folder)


def _fill_figures(text: str, figures: Mapping[str, Column], folder: Path) -> str:
    def replace(found: re.Match[str]) -> str:
        if found["name"] not in figures:
            raise TableError(f"no figure is called {found['name']!r}, expected one of {', '.join(figures)}")
        if found["begin"] is not None:
            raise TableError(f"the marker of figure {found['name']!r} begins a line: it would end the paragraph")
        return found[2] + render_figure(figures[found["name"]], folder) + found[5]

    begun, ended = text.count("<!-- figure: "), len(FIGURE.findall(text))
    if begun != ended or any("<!-- figure: " in found["figure"] for found in FIGURE.finditer(text)):
        raise TableError(f"{begun} figures begin, but not each has its own <!-- end --> on its line")
    return FIGURE.sub(replace, text)


def write(pages: Sequence[Path], tables: Mapping[str, Table] = TABLES) -> list[Path]:
    """Replace all marked tables; returns the changed pages.

    Raises:
        TableError: as :func:`fill`, or a table is not on exactly one page; then no page is changed.
    """
    before = {page: page.read_text(encoding="utf-8") for page in pages}
    after = {page: fill(text, tables) for page, text in before.items()}
    found = [marked["name"] for text in before.values() for marked in MARKED.finditer(text)]
    for name in tables:
        if found.count(name) != 1:
            raise TableError(f"table {name!r} stands in {found.count(name)} places, expected 1; look for its marker")
    changed = [page for page in pages if before[page] != after[page]]
    for page in changed:
        page.write_text(after[page], encoding="utf-8")
    return changed


def chart_files() -> dict[Path, str]:
    """All charts, by file.

    Raises:
        TableError: a file or a number is missing.
    """
    charts: dict[str, Callable[[Mode], str]] = {
        name.replace(" ", "-"): partial(draw, heading, chart_groups(TABLES[name])) for name, heading in CHARTS.items()
    }
    charts["header-growth"] = partial(draw_growth, HEADER_GROWTH, header_curves())
    return {
        CHARTS_FOLDER / f"{name}-{mode}.svg": drawn(colours)
        for name, drawn in charts.items()
        for mode, colours in MODES.items()
    }


def write_charts() -> list[Path]:
    """Write all charts; returns the changed files."""
    CHARTS_FOLDER.mkdir(exist_ok=True)
    files = chart_files()
    changed = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in changed:
        path.write_text(files[path], encoding="utf-8")
    return changed


def chart_groups(table: Table, folder: Path = RESULTS) -> list[Group]:
    """The bars of a chart: a group for each row of the table, a bar for each column of ratios.

    Raises:
        TableError: a file or a number is missing.
    """
    columns = [column for column in table.columns if column.places[0][-1] == "median_ratio"]
    groups = []
    for label, blanks in table.rows.items():
        paths = [folder / (column.file or table.file).format_map(blanks) for column in columns]
        bars = [
            Bar(column.title, _cell(column, blanks, path), _timed(column, blanks, path))
            for column, path in zip(columns, paths, strict=True)
        ]
        groups.append(Group(label.replace("`", ""), _kind(blanks), bars))
    return groups


def header_curves(path: Path = RESULTS / HEADERS) -> list[Curve]:
    """The measured and the modelled times of both ways to exchange headers.

    Raises:
        TableError: a file or a number is missing.
    """
    curves = []
    for kind, way in (("gloo all_gather", "all_gather"), ("legacy_ddp", "tree")):
        for style, model in (("dashes", "0"), ("line", "1")):
            place = ("results", "modelled", model, "ways", way, "exchange_ms")
            modelled = _value(_read(path), place, path, "model")
            curves.append(Curve(kind, {int(size): value for size, value in modelled.items()}, style))
        run = _value(_read(path), ("results", "run"), path, "run")
        measured = {int(size): _number(run, (size, way, "median_ms"), path) for size in run}
        curves.append(Curve(kind, measured, "points"))
    return curves


def _kind(blanks: Mapping[str, str]) -> str:
    variant = next(iter(blanks.values()))
    return KINDS[0 if variant.startswith("ours") else 1 if variant.startswith("torch DDP") else 2]


def _timed(column: Column, blanks: Mapping[str, str], path: Path) -> list[Timed]:
    """The rows of the results behind a cell, with their quartiles."""
    found = []
    for place in column.places:
        row = ("results", *(part.format_map(blanks) for part in place[:-1]))
        numbers = [("median_ms",), ("median_ratio",), ("ratio_quartiles", "0"), ("ratio_quartiles", "1"), ("n",)]
        median, ratio, low, high, n = (_number(_read(path), (*row, *number), path) for number in numbers)
        found.append(Timed(median, ratio, (low, high), int(n)))
    return found


@cache
def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(f"{path} cannot be read: {error}") from error


def _cell(column: Column, blanks: Mapping[str, str], path: Path) -> str:
    places = [tuple(part.format_map(blanks) for part in place) for place in column.places]
    if column.is_text:
        return column.form.format(*(_text(_read(path), ("results", *place), path) for place in places))
    numbers = [_number(_read(path), ("results", *place), path) for place in places]
    if not column.is_range:
        return column.form.format(*numbers)
    ends = [column.form.format(number) for number in (min(numbers), max(numbers))]
    return column.between.join(dict.fromkeys(ends))


def _number(value: Any, place: Place, path: Path) -> float:
    value = _value(value, place, path, "number")
    if not isinstance(value, int | float):
        raise TableError(f"{path} has no number at {' / '.join(place)}: got {value!r}")
    return value


def _text(value: Any, place: Place, path: Path) -> str:
    value = _value(value, place, path, "text")
    if not isinstance(value, str):
        raise TableError(f"{path} has no text at {' / '.join(place)}: got {value!r}")
    return value.replace("|", "\\|")


def _value(value: Any, place: Place, path: Path, kind: str) -> Any:
    for part in place:
        inside = dict(enumerate(value)) if isinstance(value, list) else value
        key = int(part) if isinstance(value, list) and part.isdigit() else part
        if not isinstance(inside, dict) or key not in inside:
            raise TableError(f"{path} has no {kind} at {' / '.join(place)}: {part!r} is not there")
        value = inside[key]
    return value


def _line(cells: Sequence[str]) -> str:
    # As a separator Markdown is usually written without blanks.
    return "|---" * len(cells) + "|\n" if set(cells) == {"---"} else "| " + " | ".join(cells) + " |\n"


if __name__ == "__main__":
    main()
