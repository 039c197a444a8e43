"""Record of a chart, its axis of steps, and the down-sampling to the size of a screen. Needs bokeh."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np
from bokeh.models import BasicTickFormatter, CrosshairTool, Range1d, Span
from bokeh.plotting import figure
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

# On a page of 800 pixels a column is at least one pixel wide and a row one pixel high, so every cell is visible.
MAX_COLUMNS = 400
MAX_ROWS = 500
MAX_POINTS = 2000
# Classes of cells. FLAGGED: ranks differ, or bits differ and norms do not. RAMP and above: levels of the colour ramp.
ABSENT, ZERO, FLAGGED, NONFINITE, RAMP = range(5)
LEVELS = 200
_HEIGHT = 220
_GREY = "#767676"


@dataclass(frozen=True)
class Bins:
    """``total`` consecutive items, divided into bins of ``size`` items; the last bin may have fewer items."""

    total: int
    size: int

    @staticmethod
    def at_most(total: int, count: int) -> "Bins":
        return Bins(total, max(1, -(-total // count)))

    @property
    def count(self) -> int:
        return -(-self.total // self.size)

    @cached_property
    def starts(self) -> Indices:
        return np.arange(self.count, dtype=np.intp) * self.size

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first and the last item of each bin."""
        return [(start, min(self.total, start + self.size) - 1) for start in map(int, self.starts)]


@dataclass(frozen=True)
class Grid:
    """Columns of equal width over steps recorded at equal intervals.

    ``first``: the first step. ``stride``: interval between steps. ``bins``: of steps; each bin is a column. ``start``:
    the first step stands for the state before training.
    """

    first: int
    stride: int
    bins: Bins
    start: bool = False

    @staticmethod
    def of(steps: Collection[int], starts: Collection[int] = ()) -> "Grid":
        """``starts``: steps before the first of ``steps``. They get the position before it, whatever the distance."""
        known = sorted(set(steps)) or sorted(set(starts)) or [0]
        stride = gcd(*(step - known[0] for step in known)) or 1
        before = known[0] - min(starts, default=known[0])
        first = known[0] - max(0, -(-before // stride)) * stride
        start = bool(starts) and (before > 0 or not steps)
        return Grid(first, stride, Bins.at_most((known[-1] - first) // stride + 1, MAX_COLUMNS), start)

    @property
    def last(self) -> int:
        return self.first + (self.bins.total - 1) * self.stride

    def holds(self, steps: Collection[int]) -> bool:
        return all(self.first <= step <= self.last and not (step - self.first) % self.stride for step in steps)

    @property
    def count(self) -> int:
        return self.bins.count

    @property
    def width(self) -> int:
        return self.bins.size * self.stride

    @property
    def left(self) -> float:
        return self.first - self.stride / 2  # a step is in the middle of its interval

    @property
    def right(self) -> float:
        return self.left + self.bins.total * self.stride

    def column(self, step: int) -> int:
        return (step - self.first) // self.stride // self.bins.size

    @property
    def labels(self) -> list[str]:
        """The steps of each column as text."""
        spans = [(self.first + first * self.stride, self.first + last * self.stride) for first, last in self.bins.spans]
        names = ["start" if self.start and first == self.first else str(first) for first, _ in spans]
        return [
            name if first == last else f"{name} to {last}" for name, (first, last) in zip(names, spans, strict=True)
        ]

    def captions(self, shown: str) -> list[str]:
        if self.bins.size > 1:
            recorded = "steps" if self.stride == 1 else f"recorded steps ({self.width} steps)"
            return [f"Each column stands for {self.bins.size} {recorded} and shows {shown}."]
        return [f"Each column stands for a recorded step, every {self.stride}."] if self.stride > 1 else []


class Cells:
    """Table of cells by row and column. A cell keeps the extreme values of its items.

    ``largest``: the largest value, NaN without any. ``nonfinite``: the largest number of non-finite elements.
    ``differs``: whether any item differs.
    """

    def __init__(self, rows: Bins, columns: int) -> None:
        self.rows = rows
        self.largest = np.full((rows.count, columns), np.nan)
        self.nonfinite = np.zeros((rows.count, columns), dtype=np.int64)
        self.differs = np.zeros((rows.count, columns), dtype=np.bool_)

    def add_values(self, column: int, values: Floats) -> None:
        """Add a value for each item; NaN for no value."""
        binned = np.fmax.reduceat(values, self.rows.starts) if len(values) else values
        np.fmax(self.largest[:, column], binned, out=self.largest[:, column])

    def add_nonfinite(self, column: int, counts: Mapping[int, int]) -> None:
        for item, count in counts.items():
            row = item // self.rows.size
            self.nonfinite[row, column] = max(count, self.nonfinite[row, column])

    def add_differing(self, column: int, differing: NDArray[np.bool_]) -> None:
        self.differs[np.flatnonzero(differing) // self.rows.size, column] = True


def extremes(values: Floats, max_points: int = MAX_POINTS) -> Indices:
    """Indices of the points to draw: all, or the smallest and the largest value of each of ``max_points / 2`` bins.

    A bin without any value keeps a NaN, so that the line has a gap there.
    """
    if len(values) <= max_points:
        return np.arange(len(values), dtype=np.intp)
    kept: list[int] = []
    for start in (bins := Bins.at_most(len(values), max_points // 2)).starts:
        part = values[start : start + bins.size]
        ends = {int(np.nanargmin(part)), int(np.nanargmax(part))} if not np.isnan(part).all() else {0}
        kept.extend(int(start) + end for end in sorted(ends))
    return np.array(kept, dtype=np.intp)


def classify(values: Floats, decades: float) -> tuple[NDArray[np.uint8], tuple[float, float]]:
    """The class of every value, and the ends of the ramp as exponents of ten.

    The ramp is logarithmic, and covers at most ``decades`` below the largest value.
    """
    classes = np.full(values.shape, ABSENT, dtype=np.uint8)
    classes[values == 0] = ZERO
    positive = np.nan_to_num(values, nan=0.0) > 0
    logs = np.log10(values[positive])
    if not len(logs):
        return classes, (-1.0, 0.0)
    high = float(logs.max())
    low = max(float(logs.min()), high - decades)
    low, high = (low, high) if high - low > 1e-3 else (low - 0.5, high + 0.5)
    levels = (logs.clip(low, high) - low) / (high - low) * (LEVELS - 1)
    classes[positive] = RAMP + levels.round().astype(np.uint8)
    return classes, (low, high)


def row_captions(rows: Bins, items: str) -> list[str]:
    return [f"Each row stands for {rows.size} {items} in the same way."] if rows.size > 1 else []


@dataclass(frozen=True)
class Chart:
    """A title, captions, a figure and a table. Without both, the captions give the reason.

    ``swatches``: colours with their labels. ``table``: rows; the first is the header.
    """

    title: str
    captions: tuple[str, ...]
    plot: figure | None = None
    swatches: tuple[tuple[str, str], ...] = ()
    table: tuple[tuple[str, ...], ...] = ()


class Axis:
    """The axis of steps. All charts share it, and the line at the pointer."""

    def __init__(self, first: float, last: float) -> None:
        self._steps = Range1d(first, last, bounds="auto")
        self._pointer = Span(dimension="height", line_color=_GREY, line_dash="dotted")

    def plot(self, y_label: str, height: int = _HEIGHT, **more: object) -> figure:
        plot = figure(
            x_range=self._steps,
            frame_height=height,
            sizing_mode="stretch_width",
            # Equal borders align the steps of all charts.
            min_border_left=116,
            min_border_right=84,
            tools="pan,box_zoom,wheel_zoom,reset,save",
            active_drag="box_zoom",
            active_scroll=None,
            x_axis_label="step",
            y_axis_label=y_label,
            toolbar_location="above",
            **more,
        )
        plot.add_tools(CrosshairTool(overlay=self._pointer))
        plot.toolbar.logo = None
        plot.xaxis.formatter = BasicTickFormatter(use_scientific=False)
        plot.xaxis.ticker.min_interval, plot.xaxis.ticker.num_minor_ticks = 1, 0
        plot.axis.axis_label_text_font_style = "normal"
        plot.axis.axis_label_text_font_size = plot.axis.major_label_text_font_size = "12px"
        return plot
