"""Heat map of parameters by step: norms of one run, or differences of two runs. Needs bokeh."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from legacy_ddp.debug._page.bin_text import column_captions, column_labels, row_captions
from legacy_ddp.debug._page.cell_classes import ABSENT, FLAGGED, LEVELS, NONFINITE, ZERO, classify
from legacy_ddp.debug._page.chart import BLACK, BLUES, BROWNS, LIGHT, SKY, VERMILLION, WHITE, Axis, Chart
from legacy_ddp.debug._page.heatmap import HeatMap, add_column_markers, colour_ramp, draw_heat_map, short_label
from legacy_ddp.debug._page.parameter_cells import ParameterCells
from legacy_ddp.debug._page.series import Series

_DECADES = 12  # of norms


def parameter_chart(axis: Axis, series: Series) -> Chart:
    two_runs = len(series.calls) == 2
    title = "Difference of the two runs" if two_runs else "Reduced gradients"
    title += ", by parameter and step"
    parameters = series.parameters
    if not parameters.names:
        return Chart(title, ("Left out: the trace holds neither reduced gradients nor parameters.",))
    heat_map = _differences(parameters) if two_runs else _norms(parameters)
    plot = draw_heat_map(axis, heat_map)
    cells = parameters.cells
    add_column_markers(plot, heat_map, [(cells.differs, VERMILLION), (cells.nonfinite > 0, BLACK)])
    captions = (*_captions(series, two_runs=two_runs), *_bin_captions(parameters))
    return Chart(title, captions, plot, _swatches(heat_map, two_runs=two_runs))


def _norms(parameters: ParameterCells) -> HeatMap:
    cells = parameters.cells
    classes, ramp = classify(cells.largest, _DECADES)
    classes[cells.nonfinite > 0] = NONFINITE
    classes[cells.differs] = FLAGGED
    return _heat_map(
        parameters,
        classes,
        ramp,
        colours=[WHITE, LIGHT, VERMILLION, BLACK, *colour_ramp(BLUES)],
        class_labels=["no gradient", "zero", "ranks differ", "not finite"],
        value_title="norm",
        ramp_title="2-norm",
    )


def _differences(parameters: ParameterCells) -> HeatMap:
    cells = parameters.cells
    classes, ramp = classify(cells.largest, _DECADES)
    classes[cells.differs & (cells.largest == 0)] = FLAGGED
    classes[cells.nonfinite > 0] = NONFINITE
    special = ["not in both", "equal bits", "norms equal, bits differ", "not finite"]
    return _heat_map(
        parameters,
        classes,
        ramp,
        colours=[WHITE, LIGHT, SKY, BLACK, *colour_ramp(BROWNS)],
        class_labels=[*special, *["bits differ"] * LEVELS],
        value_title="norms apart by",
        ramp_title="relative",
    )


def _heat_map(
    parameters: ParameterCells,
    classes: NDArray[np.uint8],
    ramp: tuple[float, float],
    *,
    colours: Sequence[str],
    class_labels: Sequence[str],
    value_title: str,
    ramp_title: str,
) -> HeatMap:
    names, cells, grid = parameters.names, parameters.cells, parameters.grid
    spans = [cells.rows.span(row) for row in range(cells.rows.count)]
    return HeatMap(
        grid=grid,
        classes=classes,
        values=cells.largest,
        colours=colours,
        row_title="parameter",
        row_labels=[_row_label(names[first : last + 1]) for first, last in spans],
        row_ticks=[short_label(names[first].strip("'\""), last - first) for first, last in spans],
        column_labels=column_labels(grid),
        value_title=value_title,
        class_labels=class_labels,
        ramp_title=ramp_title,
        ramp=ramp,
        nonfinite={int(index): int(cells.nonfinite.flat[index]) for index in np.flatnonzero(cells.nonfinite)},
        binned=grid.bins.size > 1 or cells.rows.size > 1,
        height=min(560, max(130, 16 * cells.rows.count)),
    )


def _row_label(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} parameters)"


def _swatches(heat_map: HeatMap, *, two_runs: bool) -> tuple[tuple[str, str], ...]:
    labels = {
        ABSENT: "not in both runs" if two_runs else "no gradient",
        ZERO: "equal bits" if two_runs else "norm is zero",
        FLAGGED: "norms equal, bits differ" if two_runs else "ranks differ",
        NONFINITE: "NaN or infinity in either run" if two_runs else "NaN or infinity",
    }
    return tuple((heat_map.colours[number], label) for number, label in labels.items())


def _captions(series: Series, *, two_runs: bool) -> list[str]:
    if two_runs:
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


def _bin_captions(parameters: ParameterCells) -> list[str]:
    shown = "the largest value among them; anything that is not finite, or differs, shows"
    triangles = "A triangle above a column: something in it differs (red), or is not finite (black)."
    return [triangles, *column_captions(parameters.grid, shown), *row_captions(parameters.cells.rows, "parameters")]
