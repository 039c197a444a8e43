"""Heat map of the seconds which ranks waited by step, and a table of stragglers. Needs bokeh."""

from collections.abc import Sequence

import numpy as np

from legacy_ddp.debug._page.bin_text import column_captions, column_labels, row_captions
from legacy_ddp.debug._page.binning import MAX_ROWS, Bins, Cells, Grid
from legacy_ddp.debug._page.call_table import CallTable
from legacy_ddp.debug._page.cell_classes import classify
from legacy_ddp.debug._page.chart import BLUES, LIGHT, WHITE, Axis, Chart
from legacy_ddp.debug._page.heatmap import HeatMap, colour_ramp, draw_heat_map
from legacy_ddp.debug._page.rank_statistics import NO_RANK, Straggler, stragglers, stragglers_by_step

_DECADES = 4
_MAX_STRAGGLERS = 8
_CAPTIONS = (
    "Seconds that each rank waited in the call for the headers of the others. The rank that the others waited for "
    "waited least: a light cell under dark ones.",
    "One rank is always the last. A rank that is last again and again, by seconds that matter, is slow.",
)


def wait_chart(axis: Axis, calls: CallTable, grid: Grid, label: str) -> Chart:
    title = f"Who waited for whom{f': {label}' if label else ''}"
    if calls.world_size < 2:
        return Chart(title, ("Left out: a single rank waits for no other rank.",))
    if not len(calls.steps):
        return Chart(title, ("Left out: no call is in the trace.",))
    cells = Cells(Bins.at_most(calls.world_size, MAX_ROWS), grid.count)
    for step, waited in zip(calls.steps, calls.waited.T, strict=True):
        cells.add_values(grid.column(int(step)), waited)
    plot = draw_heat_map(axis, _heat_map(cells, calls, grid))
    found = stragglers(calls.waited)
    captions = [*column_captions(grid, "the longest wait"), *row_captions(cells.rows, "ranks")]
    if label != "B":  # the chart of A has them
        captions = [*_CAPTIONS, *captions]
    if len(found) > _MAX_STRAGGLERS:
        captions.append(f"{len(found) - _MAX_STRAGGLERS} more ranks were last, and cost less.")
    swatches = ((LIGHT, "did not wait"), (WHITE, "not recorded"))
    return Chart(title, tuple(captions), plot, swatches, _straggler_table(found, len(calls.steps)))


def _heat_map(cells: Cells, calls: CallTable, grid: Grid) -> HeatMap:
    classes, ramp = classify(cells.largest, _DECADES)
    spans = [cells.rows.span(row) for row in range(cells.rows.count)]
    ranks = [f"rank {first}" if first == last else f"ranks {first}-{last}" for first, last in spans]
    return HeatMap(
        grid=grid,
        classes=classes,
        values=cells.largest,
        colours=[WHITE, LIGHT, WHITE, WHITE, *colour_ramp(BLUES)],
        row_title="who waited",
        row_labels=ranks,
        row_ticks=ranks,
        column_labels=_column_labels(calls, grid),
        value_title="seconds",
        class_labels=["not recorded", "did not wait"],
        ramp_title="seconds",
        ramp=ramp,
        nonfinite={},
        binned=False,  # affects only counts of non-finite elements
        height=min(560, max(100, 18 * len(ranks))),
    )


def _column_labels(calls: CallTable, grid: Grid) -> list[str]:
    """Steps and most frequent straggler of every column."""
    ranks, _ = stragglers_by_step(calls.waited)
    columns = np.array([grid.column(int(step)) for step in calls.steps])
    labels = column_labels(grid)
    for column in np.unique(columns):
        in_column = ranks[columns == column]
        found, counts = np.unique(in_column[in_column != NO_RANK], return_counts=True)
        if len(found):
            times = f" in {counts.max()} of {len(in_column)} steps" if len(in_column) > 1 else ""
            labels[column] += f", waiting for rank {found[counts.argmax()]}{times}"
    return labels


def _straggler_table(found: Sequence[Straggler], steps: int) -> tuple[tuple[str, ...], ...]:
    rows = [
        (f"rank {item.rank}", f"{item.times} of {steps}", f"{item.median_seconds:.3g}", f"{item.seconds:.3g}")
        for item in found[:_MAX_STRAGGLERS]
    ]
    return ("last to come", "steps", "median wait of the others [s]", "all together [s]"), *rows
