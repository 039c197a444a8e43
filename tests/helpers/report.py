"""A written report, as a reader of the file sees it: sections with their captions, tables and figures."""

import json
import re
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.models import HoverTool, Line

from tests.helpers.command import command

LOCAL, NOISE = "Local gradients", "Gradient noise scale"


@dataclass(frozen=True)
class Shown:
    """A section. ``figure``: bokeh's model, None without a chart. ``table``: texts of the cells."""

    title: str
    captions: list[str]
    table: list[tuple[str, ...]]
    figure: Any

    def glyphs(self, kind: type[Any]) -> list[Any]:
        return [item for item in self.figure.renderers if isinstance(item.glyph, kind)]

    @property
    def lines(self) -> list[tuple[list[int], list[float]]]:
        found = [item.data_source.data for item in self.glyphs(Line)]
        return [([*map(int, data["step"])], [*map(float, data["value"])]) for data in found]

    @property
    def legend(self) -> list[str]:
        return [item.label.value for legend in self.figure.legend for item in legend.items]

    @property
    def hover(self) -> list[HoverTool]:
        return [tool for tool in self.figure.tools if isinstance(tool, HoverTool)]

    def _texts(self, key: str) -> dict[str, Any]:
        return dict(self.hover[0].formatters[key].args)

    @property
    def rows(self) -> list[str]:
        """What the pointer shows of each row of a heat map."""
        return list(self._texts("$y")["rows"])

    @property
    def columns(self) -> list[str]:
        return list(self._texts("$x")["columns"])

    def _image(self, key: str) -> Any:
        (image,) = (item for item in self.figure.renderers if "cell" in item.data_source.data)
        return np.array(image.data_source.data[key][0])

    @property
    def values(self) -> Any:
        """The values of all cells, NaN for none."""
        values = self._image("value")
        return np.where(values < 0, np.nan, values)

    @property
    def labels(self) -> list[list[str]]:
        """What the pointer says of all cells, besides their values."""
        texts, cells = self._texts("@cell"), self._image("cell")
        names = [texts["labels"][cell] if cell < len(texts["labels"]) else texts["other"] for cell in cells.flat]
        for at, count in texts["counts"].items():
            names[int(at)] += f", {texts['most']}{count}"
        width = cells.shape[1]
        return [names[at : at + width] for at in range(0, len(names), width)]

    def cell(self, row: str, column: str) -> tuple[float, str]:
        at = self.rows.index(row), self.columns.index(column)
        return float(self.values[at]), self.labels[at[0]][at[1]]

    def cells_with(self, text: str) -> set[tuple[str, str]]:
        """Rows and columns of the cells of which the pointer says a text."""
        labels = self.labels
        return {
            (row, column)
            for row, of_row in zip(self.rows, labels, strict=True)
            for column, label in zip(self.columns, of_row, strict=True)
            if text in label
        }


def write_report(folder: Path, *traces: Path) -> Path:
    """The file that ``legacy-ddp report`` writes about these folders."""
    path = folder / "report.html"
    done = command("report", *traces, "-o", path)
    assert (done.returncode, done.stderr) == (0, f"wrote {path}\n"), done.stderr
    return path


def text_of(path: Path) -> str:
    """The words of a page, without its scripts and styles."""
    page = re.sub(r"<(script|style)>.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


def report(folder: Path, *traces: Path) -> list[Shown]:
    page = write_report(folder, *traces).read_text(encoding="utf-8")
    found = re.search(r"const docs_json = '(.*)';", page)
    # bokeh escapes for HTML, and backslashes for JavaScript.
    documents = json.loads(unescape(found[1].replace(r"\\", "\\"))) if found else {}
    roots = [root for item in documents.values() for root in Document.from_json(item).roots]
    figures = {root.id: root for root in roots}
    return [_shown(part, figures) for part in re.findall(r"<section>(.*?)</section>", page, re.DOTALL)]


def _shown(part: str, figures: dict[str, Any]) -> Shown:
    def texts(pattern: str, text: str = part) -> list[str]:
        return [unescape(found) for found in re.findall(pattern, text, re.DOTALL)]

    rows = [tuple(texts(r"<t[hd]>(.*?)</t[hd]>", row)) for row in re.findall(r"<tr>(.*?)</tr>", part, re.DOTALL)]
    (title,), ids = texts("<h2>(.*?)</h2>"), texts('data-root-id="(.*?)"')
    return Shown(title, texts('<p class="caption">(.*?)</p>'), rows, figures[ids[0]] if ids else None)


def titled(sections: list[Shown], title: str) -> Shown:
    """The only section whose title begins so."""
    (found,) = (item for item in sections if item.title.startswith(title))
    return found
