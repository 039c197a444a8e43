"""A line for every rank of the runs; for many ranks a band, the median and the outliers. Needs bokeh."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from bokeh.models import GlyphRenderer
from bokeh.plotting import figure
from numpy.typing import NDArray

from legacy_ddp._compare import name_ranks
from legacy_ddp.debug._page.binning import MAX_POINTS, Bins, Floats
from legacy_ddp.debug._page.chart import BLACK
from legacy_ddp.debug._page.lines import (
    ONE_RUN,
    TWO_RUNS,
    LegendEntries,
    Line,
    LineStyle,
    draw_band,
    draw_line,
    run_captions,
    with_run,
)
from legacy_ddp.debug._page.rank_statistics import MAX_OUTLIERS, OUTLIER_FACTOR, outliers

MAX_LINES = 12
# Okabe and Ito (2008) without their yellow, which is invisible on white; then the "muted" colours of Tol.
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"),
    *("#332288", "#882255", "#999933", "#44aa99", "#000000", "#aa4499"),
)


@dataclass(frozen=True)
class RankTable:
    """Values of a run: a row for each rank, a column for each of ``steps``, NaN for no value."""

    steps: NDArray[np.int64]
    values: Floats

    @property
    def world_size(self) -> int:
        return len(self.values)


def draw_ranks(
    plot: figure, runs: Sequence[RankTable], labels: Sequence[str], noun: str, value_title: str
) -> tuple[list[str], LegendEntries]:
    """Draw the values of every rank; captions and entries of the legend. ``noun``: a value, in the captions."""
    captions, entries = run_captions(labels), LegendEntries()
    many = max(run.world_size for run in runs) > MAX_LINES
    for run, label, style in zip(runs, labels, TWO_RUNS if len(runs) == 2 else ONE_RUN, strict=True):
        if many:
            entries.append((with_run(label, "min to max"), _band(plot, run, style)))
            captions.append(_band_caption(run, label, noun))
        for line in _summary_lines(run, label) if many else _rank_lines(run, label):
            entries.append((line.label, draw_line(plot, line, style, value_title)))
    return captions, entries


def bin_captions(runs: Sequence[RankTable]) -> list[str]:
    """The caption of lines with more steps than points."""
    sizes = [Bins.at_most(len(run.steps), MAX_POINTS // 2).size for run in runs if len(run.steps) > MAX_POINTS]
    if not sizes:
        return []
    return [f"Of every {max(sizes)} recorded steps a line goes through the smallest and the largest value."]


def _rank_lines(run: RankTable, label: str) -> Iterable[Line]:
    for rank, values in enumerate(run.values):
        yield Line(with_run(label, f"rank {rank}"), f"rank {rank}", run.steps, values, COLOURS[rank])


def _summary_lines(run: RankTable, label: str) -> Iterable[Line]:
    """The median, and the outliers."""
    medians = np.full(len(run.steps), np.nan)
    columns = _known_columns(run)
    medians[columns] = np.nanmedian(run.values[:, columns], axis=0)
    yield Line(with_run(label, "median"), with_run(label, "median"), run.steps, medians, BLACK)
    for rank, colour in zip(outliers(run.values), COLOURS, strict=False):
        yield Line(with_run(label, f"rank {rank}"), f"rank {rank}", run.steps, run.values[rank], colour)


def _known_columns(run: RankTable) -> NDArray[np.intp]:
    return np.flatnonzero(~np.isnan(run.values).all(axis=0))


def _band(plot: figure, run: RankTable, style: LineStyle) -> GlyphRenderer:
    """Band from the smallest to the largest value of all ranks, and of all steps of a bin."""
    columns = _known_columns(run)
    starts = Bins.at_most(len(columns), MAX_POINTS).starts
    values = run.values[:, columns]
    if not len(columns):
        return draw_band(plot, run.steps[columns], np.zeros(0), np.zeros(0), style)
    low = np.minimum.reduceat(np.nanmin(values, axis=0), starts)
    high = np.maximum.reduceat(np.nanmax(values, axis=0), starts)
    return draw_band(plot, run.steps[columns][starts], low, high, style)


def _band_caption(run: RankTable, label: str, noun: str) -> str:
    found = outliers(run.values)
    return (
        f"{label or 'The run'} has {run.world_size} ranks: the band goes from the smallest {noun} to the largest, the "
        "black line is the median. Lines of their own have ranks that are off the median by a factor of "
        f"{OUTLIER_FACTOR} in half of the steps, {MAX_OUTLIERS} at most: {name_ranks(found) if found else 'none'}."
    )
