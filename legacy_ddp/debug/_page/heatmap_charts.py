"""What do the heat maps of a page show: parameters by step, and who waited for whom? Needs bokeh."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from legacy_ddp.debug._page.binning import MOST_ROWS, Bins, Cells, Grid
from legacy_ddp.debug._page.chart import BLACK, VERMILLION, Axis, Chart
from legacy_ddp.debug._page.heatmap import (
    LEVELS,
    NONFINITE,
    NOTHING,
    ODD,
    QUIET,
    Picture,
    classes_of,
    draw_cells,
    mark_columns,
    ramp,
    short_label,
)
from legacy_ddp.debug._page.rank_series import NOBODY, Calls, Lateness, last_ranks, lateness
from legacy_ddp.debug._page.series import Heat, Series

_DECADES = 12  # of norms; what is smaller by more looks like the smallest
_WAIT_DECADES = 4
_MOST_LATE = 8
_WAITING = (
    "Seconds that each rank waited in the call for the headers of the others. The rank that the others waited for "
    "waited least: a light cell under dark ones.",
    "Somebody is always last. A rank that is last again and again, by seconds that matter, is slow.",
)
_WHITE, _LIGHT, _SKY = "#ffffff", "#e8e8e8", "#56b4e9"
_BLUES = ("#dbe9f6", "#9dc6e0", "#4a98c9", "#17509a")
_BROWNS = ("#ffe9a8", "#fdae4b", "#d95f0e", "#7f2704")


def parameters(axis: Axis, series: Series) -> Chart:
    """Every parameter in every step: the norm of one run, the distance of two."""
    heat, two = series.heat, len(series.calls) == 2
    title = "Difference of the two runs, by parameter and step" if two else "Reduced gradients, by parameter and step"
    if not heat.names:
        return Chart(title, ("Left out: the trace holds neither reduced gradients nor parameters.",))
    picture = _distances(heat) if two else _norms(heat)
    plot = draw_cells(axis, picture)
    mark_columns(plot, picture, [(heat.cells.marked, VERMILLION), (heat.cells.nonfinite > 0, BLACK)])
    return Chart(title, (*_said(series), *_said_of_bins(heat)), plot, _swatches(picture, two=two))


def waits(axis: Axis, calls: Calls, grid: Grid, label: str) -> Chart:
    """Who waited for whom."""
    title = f"Who waited for whom{f': {label}' if label else ''}"
    if calls.world_size < 2:
        return Chart(title, ("Left out: a single rank waits for nobody.",))
    if not len(calls.steps):
        return Chart(title, ("Left out: no call is in the trace.",))
    cells = Cells(Bins.at_most(calls.world_size, MOST_ROWS), grid.count)
    for step, waited in zip(calls.steps, calls.waited.T, strict=True):
        cells.put(grid.column(int(step)), waited)
    plot = draw_cells(axis, _waits(cells, calls, grid))
    late = lateness(calls.waited)
    words = [*_said_of_columns(grid, "the longest wait"), *_said_of_rows(cells.rows, "ranks")]
    if label != "B":  # it is said once
        words = [*_WAITING, *words]
    if len(late) > _MOST_LATE:
        words.append(f"{len(late) - _MOST_LATE} more ranks were last, and cost less.")
    swatches = ((_LIGHT, "did not wait"), (_WHITE, "not recorded"))
    return Chart(title, tuple(words), plot, swatches, _late_table(late, len(calls.steps)))


def _late_table(late: Sequence[Lateness], steps: int) -> tuple[tuple[str, ...], ...]:
    rows = [
        (f"rank {one.rank}", f"{one.times} of {steps}", f"{one.median_seconds:.3g}", f"{one.seconds:.3g}")
        for one in late[:_MOST_LATE]
    ]
    return ("last to come", "steps", "median wait of the others [s]", "all together [s]"), *rows


def steps_in_words(grid: Grid) -> list[str]:
    """What each column of a grid stands for."""
    return [_span(grid, column) for column in range(grid.count)]


def _span(grid: Grid, column: int) -> str:
    first, last = grid.span(column)
    begins = "start" if grid.start and column == 0 else str(first)
    return begins if first == last else f"{begins} to {last}"


def _norms(heat: Heat) -> Picture:
    cells = heat.cells
    classes, bar = classes_of(cells.largest, -_DECADES)
    classes[cells.nonfinite > 0] = NONFINITE
    classes[cells.marked] = ODD
    return _picture(
        heat,
        classes,
        bar,
        colours=[_WHITE, _LIGHT, VERMILLION, BLACK, *ramp(_BLUES)],
        words=["no gradient", "zero", "ranks differ", "not finite"],
        value_is="norm",
        bar_title="2-norm",
    )


def _distances(heat: Heat) -> Picture:
    cells = heat.cells
    classes, bar = classes_of(cells.largest, -_DECADES)
    classes[cells.marked & (cells.largest == 0)] = ODD
    classes[cells.nonfinite > 0] = NONFINITE
    return _picture(
        heat,
        classes,
        bar,
        colours=[_WHITE, _LIGHT, _SKY, BLACK, *ramp(_BROWNS)],
        words=["not in both", "equal bits", "norms equal, bits differ", "not finite", *["bits differ"] * LEVELS],
        value_is="norms apart by",
        bar_title="relative",
    )


def _picture(
    heat: Heat,
    classes: NDArray[np.uint8],
    bar: tuple[float, float],
    *,
    colours: Sequence[str],
    words: Sequence[str],
    value_is: str,
    bar_title: str,
) -> Picture:
    rows = heat.cells.rows
    spans = [rows.span(row) for row in range(rows.count)]
    return Picture(
        grid=heat.grid,
        classes=classes,
        values=heat.cells.largest,
        colours=colours,
        row_is="parameter",
        rows=[_together(heat.names[first : last + 1]) for first, last in spans],
        short=[short_label(heat.names[first].strip("'\""), last - first) for first, last in spans],
        columns=steps_in_words(heat.grid),
        value_is=value_is,
        words=words,
        bar_title=bar_title,
        bar=bar,
        counts={int(place): int(heat.cells.nonfinite.flat[place]) for place in np.flatnonzero(heat.cells.nonfinite)},
        binned=heat.grid.bins.size > 1 or rows.size > 1,
        height=min(560, max(130, 16 * rows.count)),
    )


def _waits(cells: Cells, calls: Calls, grid: Grid) -> Picture:
    classes, bar = classes_of(cells.largest, -_WAIT_DECADES)
    spans = [cells.rows.span(row) for row in range(cells.rows.count)]
    ranks = [f"rank {first}" if first == last else f"ranks {first}-{last}" for first, last in spans]
    return Picture(
        grid=grid,
        classes=classes,
        values=cells.largest,
        colours=[_WHITE, _LIGHT, _WHITE, _WHITE, *ramp(_BLUES)],
        row_is="who waited",
        rows=ranks,
        short=ranks,
        columns=_last_in_words(calls, grid),
        value_is="seconds",
        words=["not recorded", "did not wait"],
        bar_title="seconds",
        bar=bar,
        counts={},
        binned=False,  # there is nothing to count
        height=min(560, max(100, 18 * len(ranks))),
    )


def _last_in_words(calls: Calls, grid: Grid) -> list[str]:
    """Of every column: its steps, and the rank that was waited for."""
    ranks, _ = last_ranks(calls.waited)
    columns = np.array([grid.column(int(step)) for step in calls.steps])
    said = steps_in_words(grid)
    for column in np.unique(columns):
        here = ranks[columns == column]
        found, counts = np.unique(here[here != NOBODY], return_counts=True)
        if len(found):
            times = f" in {counts.max()} of {len(here)} steps" if len(here) > 1 else ""
            said[column] += f", waiting for rank {found[counts.argmax()]}{times}"
    return said


def _swatches(picture: Picture, *, two: bool) -> tuple[tuple[str, str], ...]:
    said = {
        NOTHING: "not in both runs" if two else "no gradient",
        QUIET: "equal bits" if two else "norm is zero",
        ODD: "norms equal, bits differ" if two else "ranks differ",
        NONFINITE: "NaN or infinity in either run" if two else "NaN or infinity",
    }
    return tuple((picture.colours[kind], words) for kind, words in said.items())


def _said(series: Series) -> list[str]:
    if len(series.calls) == 2:
        ranks = "Ranks are compared each with its own." if series.every_rank else "Only rank 0 of both is compared."
        return [
            "A cell is the larger of two differences: that of the reduced gradient, and that of the parameter after "
            "the step. Where bits differ, its colour is the difference of their norms over the larger norm.",
            ranks,
        ]
    return [
        "The norm is that of the reduced gradient, which all ranks should hold alike (here from rank 0). Ranks differ: "
        "in the reduced gradient, or in the parameter after the step.",
    ]


def _said_of_bins(heat: Heat) -> list[str]:
    largest = "the largest value among them; anything that is not finite, or differs, shows"
    marks = "A triangle above a column: something in it differs (red), or is not finite (black)."
    return [marks, *_said_of_columns(heat.grid, largest), *_said_of_rows(heat.cells.rows, "parameters")]


def _said_of_columns(grid: Grid, shows: str) -> list[str]:
    if grid.bins.size == 1:
        return [f"Each column stands for a recorded step, every {grid.stride}."] if grid.stride > 1 else []
    recorded = (
        f"{grid.bins.size} steps" if grid.stride == 1 else f"{grid.bins.size} recorded steps ({grid.width} steps)"
    )
    return [f"Each column stands for {recorded} and shows {shows}."]


def _said_of_rows(rows: Bins, what: str) -> list[str]:
    return [f"Each row stands for {rows.size} {what} in the same way."] if rows.size > 1 else []


def _together(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} parameters)"
