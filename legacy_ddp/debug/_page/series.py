"""Data of a page, read from traces, and statistics over the calls. Needs numpy.

Reads every file once, and parses only the sections that are shown.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import hypot, isfinite, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legacy_ddp._statistics import estimate_noise, find_straggler
from legacy_ddp.debug._page.chart import MAX_ROWS, Bins, Cells, Floats, Grid, Indices
from legacy_ddp.debug._trace.read import KILLED, RankTrace, Run
from legacy_ddp.debug._trace.records import Names, Section

# Phases in which all ranks of a run should hold equal values. A row stands for a parameter and its gradient.
_PHASES = ("reduced_gradients", "parameters")
NO_RANK = -1
# Factor between a rank's gradient norm and the median. Batches of one distribution do not reach it in half the steps.
OUTLIER_FACTOR = 1.5
_MIN_WINDOW, _MAX_WINDOW, _WINDOW_SHARE = 10, 200, 20


@dataclass(frozen=True)
class RankTable:
    """Values of a run: a row for each rank, a column for each of ``steps``, NaN for no value."""

    steps: NDArray[np.int64]
    values: Floats


@dataclass(frozen=True)
class Metric:
    """A metric by step. ``sums``: over the ranks, NaN if not finite. ``divisors``: of the gradients."""

    steps: NDArray[np.int64]
    sums: Floats
    divisors: Floats


def read_metrics(trace: RankTrace) -> dict[str, Metric]:
    """All metrics in the trace of one rank. All ranks have the same sums."""
    rows: dict[str, list[tuple[int, float, float]]] = {}
    for step in trace.steps:
        if call := trace.call(step):
            for name, value in call.metrics.items():
                # The divisor is 0 if no rank took part.
                rows.setdefault(name, []).append((step, value if isfinite(value) else nan, call.divisor or nan))
    tables = {name: np.array(of_name).T for name, of_name in rows.items()}
    return {name: Metric(steps.astype(np.int64), sums, divisors) for name, (steps, sums, divisors) in tables.items()}


class LoggedValues:
    """The values that the ranks of a run logged. Ranks are added in ascending order.

    ``texts``: the ranks by name, step and text; of each rank and name only the last text.
    """

    def __init__(self) -> None:
        self.texts: dict[tuple[str, int, str], list[int]] = {}
        self._numbers: dict[str, list[tuple[int, int, float]]] = {}
        self._ranks = 0

    def add(self, rank: int, trace: RankTrace) -> None:
        last: dict[str, tuple[int, str]] = {}
        self._ranks = rank + 1
        for step, values in trace.logged.items():
            for name, value in values.items():
                if isinstance(value, str):
                    last[name] = step, value
                else:
                    self._numbers.setdefault(name, []).append((rank, step, value if isfinite(value) else nan))
        for name, (step, text) in last.items():
            self.texts.setdefault((name, step, text), []).append(rank)

    def tables(self) -> Mapping[str, RankTable]:
        return {name: self._table(*np.array(rows).T) for name, rows in self._numbers.items()}

    def _table(self, ranks: Floats, steps: Floats, values: Floats) -> RankTable:
        distinct, columns = np.unique(steps, return_inverse=True)
        table = np.full((self._ranks, len(distinct)), np.nan)
        table[ranks.astype(np.intp), columns] = values
        return RankTable(distinct.astype(np.int64), table)


class ParameterCells:
    """Cells of parameters by step, over the steps and parameters of ``traces``, in the order of the first.

    For one run ``cells.largest`` holds the norms of reduced gradients on rank 0, and ``cells.differs`` tells where
    ranks differ. For two runs ``cells.largest`` holds relative differences of norms, and ``cells.differs`` tells where
    bits differ.
    """

    def __init__(self, traces: Sequence[RankTrace]) -> None:
        declared = [names.names for trace in traces for phase in _PHASES for names in trace.declared(phase)]
        self.names = tuple(dict.fromkeys(_parameter(name) for names in declared for name in names))
        steps = [(step, step < trace.environment.first_step) for trace in traces for step in trace.steps]
        self.grid = Grid.of(
            {step for step, is_start in steps if not is_start}, {step for step, is_start in steps if is_start}
        )
        self.cells = Cells(Bins.at_most(len(self.names), MAX_ROWS), self.grid.count)
        self._index_of = {name: index for index, name in enumerate(self.names)}
        self._indices: dict[Names, Indices] = {}

    def add_norms(self, trace: RankTrace, *, shown: bool) -> dict[int, float]:
        """Add non-finite elements of the reduced gradients of rank 0; with ``shown`` their norms, too.

        Returns the norm of all reduced gradients together by step, where it is finite.
        """
        totals = {}
        for step in trace.steps:
            section = trace.section(step, "reduced_gradients")
            if section is None:
                continue
            if shown:
                self.cells.add_values(self.grid.column(step), self._by_parameter(section)[1])
            self._add_nonfinite(step, section)
            norms = [norm for norm in section.values.norms if norm is not None]
            if norms and not section.values.nonfinite and isfinite(total := hypot(*norms)):
                totals[step] = total
        return totals

    def add_rank_differences(self, first: RankTrace, other: RankTrace) -> None:
        for step, left, right in _differing_sections(first, other):
            differing = self._by_parameter(left)[0] != self._by_parameter(right)[0]
            self.cells.add_differing(self.grid.column(step), differing)
            self._add_nonfinite(step, right)

    def add_run_differences(self, a: RankTrace, b: RankTrace, drawn: tuple[RankTrace, RankTrace] | None = None) -> None:
        """Add the differences between two runs on one rank. ``drawn``: see :func:`_differing_sections`."""
        for step, phase in _common_sections(a, b):
            self.cells.add_values(self.grid.column(step), self._floor(a, step, phase))
        for step, left, right in _differing_sections(a, b, drawn):
            (values, norms), (other_values, other_norms) = self._by_parameter(left), self._by_parameter(right)
            differing = values != other_values
            distances = np.where(differing, _relative_differences(norms, other_norms), np.nan)
            self.cells.add_values(self.grid.column(step), distances)
            self.cells.add_differing(self.grid.column(step), differing)
            self._add_nonfinite(step, left)
            self._add_nonfinite(step, right)

    def _indices_of(self, names: Names) -> Indices:
        """The index of the parameter of each entry; ``len(self.names)`` for a parameter that rank 0 does not have."""
        if names not in self._indices:
            found = [self._index_of.get(_parameter(name), len(self.names)) for name in names.names]
            self._indices[names] = np.array(found, dtype=np.intp)
        return self._indices[names]

    def _by_parameter(self, section: Section) -> tuple[NDArray[Any], Floats]:
        """Digests and norms of every parameter; None and NaN for a parameter without an entry."""
        indices = self._indices_of(section.names)
        digests = np.full(len(self.names) + 1, None, dtype=object)
        digests[indices] = section.values.words
        norms = np.full(len(self.names) + 1, np.nan)
        norms[indices] = section.values.norms  # numpy turns None into NaN
        return digests[:-1], norms[:-1]

    def _floor(self, trace: RankTrace, step: int, phase: str) -> Floats:
        """0 for each parameter with an entry in a section, else NaN. Reads the section only if names vary by step."""
        declared = trace.declared(phase)
        values = np.full(len(self.names) + 1, np.nan)
        if len(declared) == 1:
            values[self._indices_of(declared[0])] = 0.0
        elif section := trace.section(step, phase):
            values[self._indices_of(section.names)] = 0.0
        return values[:-1]

    def _add_nonfinite(self, step: int, section: Section) -> None:
        indices = self._indices_of(section.names)
        counts = {int(indices[index]): count for index, count in section.values.nonfinite.items()}
        counts.pop(len(self.names), None)
        self.cells.add_nonfinite(self.grid.column(step), counts)


def _relative_differences(norms: Floats, others: Floats) -> Floats:
    """Difference over the larger norm; 1 if one of two norms is missing, 0 if both are missing."""
    larger = np.fmax(norms, others)
    one_missing = np.isnan(norms) != np.isnan(others)
    distance = np.divide(np.abs(norms - others), larger, out=np.zeros(len(larger)), where=larger > 0)
    return np.where(one_missing, 1.0, np.nan_to_num(distance, nan=0.0))


def _common_sections(a: RankTrace, b: RankTrace) -> Iterator[tuple[int, str]]:
    for step in a.steps:
        for phase in _PHASES:
            if a.digest(step, phase) is not None and b.digest(step, phase) is not None:
                yield step, phase


def _differing_sections(
    a: RankTrace, b: RankTrace, drawn: tuple[RankTrace, RankTrace] | None = None
) -> Iterator[tuple[int, Section, Section]]:
    """Steps, and the sections of both traces, where their digests differ.

    ``drawn``: the traces of another rank in both runs, added before. Sections with the digests of that rank have the
    same difference. They are left out, because reading takes time.
    """
    for step, phase in _common_sections(a, b):
        digests = a.digest(step, phase), b.digest(step, phase)
        if digests[0] == digests[1]:
            continue
        if drawn and digests == (drawn[0].digest(step, phase), drawn[1].digest(step, phase)):
            continue
        left, right = a.section(step, phase), b.section(step, phase)
        if left is not None and right is not None:
            yield step, left, right


def _parameter(name: str) -> str:
    """The parameter of an entry; quotation marks stand around its name."""
    return name.removeprefix("gradient of ").removeprefix("parameter ")


@dataclass(frozen=True)
class CallTable:
    """The recorded calls of a run: a row for each rank, a column for each of ``steps``, NaN for a missing call.

    ``damaged``: the local gradient was not finite. ``waited``: in seconds. ``sizes``: items in the rank's gradient, 1
    in a plain call, 0 for a rank that did not take part. ``reduced_norms``: of all parameters together, NaN if not
    finite. ``counted``: ``sizes`` come from ``sample_size``. ``ends``: end of each rank's trace, as text.
    """

    steps: NDArray[np.int64]
    local_norms: Floats
    damaged: NDArray[np.bool_]
    waited: Floats
    sizes: Floats
    reduced_norms: Floats
    counted: bool
    ends: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return len(self.local_norms)


class RankCalls:
    """The calls of one rank. ``columns``: by step, local norms, waits, sizes, and 1 for a damaged gradient."""

    def __init__(self, trace: RankTrace) -> None:
        rows = []
        self.counted = False
        for step in trace.steps:
            if call := trace.call(step):
                # The recorded norm is that of the finite elements only.
                norm = nan if call.local_norm is None or call.finite is False else call.local_norm
                size = 1 if call.sample_size is None else call.sample_size
                rows.append((step, norm, call.seconds_waited, size if call.took_part else 0, call.finite is False))
                self.counted |= call.sample_size is not None
        steps, *self.columns = np.array(rows, dtype=np.float64).reshape(-1, 5).T
        self.steps = steps.astype(np.int64)
        self.end = _end(trace)


def _end(trace: RankTrace) -> str:
    if trace.damage:
        return f"damaged: {trace.damage}"
    if trace.torn:
        return "last line torn: killed while it wrote"
    return trace.end or f"no last line: {KILLED}"


def call_table(ranks: Sequence[RankCalls], reduced_norms: Mapping[int, float]) -> CallTable:
    steps = np.unique(np.concatenate([rank.steps for rank in ranks]))
    tables = np.full((4, len(ranks), len(steps)), np.nan)
    for row, rank in enumerate(ranks):
        tables[:, row, np.searchsorted(steps, rank.steps)] = rank.columns
    local_norms, waited, sizes, damaged = tables
    return CallTable(
        steps=steps,
        local_norms=local_norms,
        damaged=damaged == 1,
        waited=waited,
        sizes=sizes,
        reduced_norms=np.array([reduced_norms.get(int(step), nan) for step in steps], dtype=np.float64),
        counted=any(rank.counted for rank in ranks),
        ends=tuple(rank.end for rank in ranks),
    )


@dataclass(frozen=True)
class Series:
    """``parameters``: of all runs together. ``calls``, ``metrics``, ``logged``: by run. ``every_rank``: all ranks were
    compared, not only rank 0.
    """

    parameters: ParameterCells
    calls: tuple[CallTable, ...]
    every_rank: bool
    metrics: tuple[Mapping[str, Metric], ...] = ()
    logged: tuple[LoggedValues, ...] = ()


def read_series(runs: Sequence[Run]) -> Series:
    """Data of a page about one run or two. At most four files are open at a time."""
    with ExitStack() as files:
        firsts = [files.enter_context(run.open(0)) for run in runs]
        parameters = ParameterCells(firsts)
        reduced = [parameters.add_norms(first, shown=len(runs) == 1) for first in firsts]
        if len(runs) == 2:
            parameters.add_run_differences(firsts[0], firsts[1])
        calls = [[RankCalls(first)] for first in firsts]
        metrics, logged = tuple(map(read_metrics, firsts)), tuple(LoggedValues() for _ in runs)
        for values, first in zip(logged, firsts, strict=True):
            values.add(0, first)
        every_rank = len({run.world_size for run in runs}) == 1
        for rank in range(1, max(run.world_size for run in runs)):
            with ExitStack() as rank_files:
                indices = [index for index, run in enumerate(runs) if rank < run.world_size]
                others = [rank_files.enter_context(runs[index].open(rank)) for index in indices]
                for index, other in zip(indices, others, strict=True):
                    calls[index].append(RankCalls(other))
                    logged[index].add(rank, other)
                if len(runs) == 1:
                    parameters.add_rank_differences(firsts[0], others[0])
                elif every_rank:
                    parameters.add_run_differences(others[0], others[1], drawn=(firsts[0], firsts[1]))
    tables = tuple(call_table(ranks, norms) for ranks, norms in zip(calls, reduced, strict=True))
    return Series(parameters, tables, every_rank, metrics, logged)


def stragglers_by_step(waited: Floats) -> tuple[NDArray[np.intp], Floats]:
    """For each step the rank with the shortest wait, and the difference to the median wait of the other ranks.

    ``NO_RANK`` and NaN for a step without a straggler, or with an unknown wait.
    """
    ranks = np.full(waited.shape[1], NO_RANK, dtype=np.intp)
    seconds = np.full(waited.shape[1], np.nan)
    for column in np.flatnonzero(~np.isnan(waited).any(axis=0)):
        found = find_straggler(waited[:, column].tolist())
        if found is not None:
            ranks[column], seconds[column] = found
    return ranks, seconds


def outliers(values: Floats) -> list[int]:
    """Ranks that are off the median by ``OUTLIER_FACTOR`` in half of their steps with positive values."""
    known = np.where(values > 0, values, np.nan)
    known = known[:, ~np.isnan(known).all(axis=0)]
    distances = np.abs(np.log(known / np.nanmedian(known, axis=0)))
    rows = [row[~np.isnan(row)] for row in distances]
    return [rank for rank, row in enumerate(rows) if len(row) and np.median(row) >= np.log(OUTLIER_FACTOR)]


def noise_scales(calls: CallTable) -> tuple[NDArray[np.int64], Floats, int]:
    """Steps, the noise scale at each step, and the number of estimates averaged for each, 0 without an estimate.

    Signal and noise are averaged before the division. NaN if an average is not positive.
    """
    steps, signal, noise = _estimates(calls)
    window = min(len(steps), _MAX_WINDOW, max(_MIN_WINDOW, len(steps) // _WINDOW_SHARE))
    if not window:
        return steps, signal, 0
    windows = np.lib.stride_tricks.sliding_window_view
    mean_signal, mean_noise = windows(signal, window).mean(axis=1), windows(noise, window).mean(axis=1)
    positive = (mean_signal > 0) & (mean_noise > 0)
    scales = np.full(len(mean_signal), np.nan)
    scales[positive] = mean_noise[positive] / mean_signal[positive]
    return steps[window - 1 :], scales, window


def _estimates(calls: CallTable) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Step, |G|² and tr(Σ), for each step with an estimate."""
    found = []
    for column, step in enumerate(calls.steps):
        part = calls.sizes[:, column] > 0
        norms, reduced = calls.local_norms[part, column], calls.reduced_norms[column]
        known = not np.isnan(calls.sizes[:, column]).any() and not calls.damaged[part, column].any()
        if known and len(norms) > 1 and not np.isnan(norms).any() and not np.isnan(reduced):
            sizes = [int(size) for size in calls.sizes[part, column]]
            estimate = estimate_noise(norms.tolist(), sizes, float(reduced))
            # The square of a norm above 1e154 overflows float64.
            if np.isfinite([estimate.squared_norm, estimate.noise]).all():
                found.append((step, estimate.squared_norm, estimate.noise))
    table = np.array(found, dtype=np.float64).reshape(-1, 3)
    return np.array([step for step, _, _ in found], dtype=np.int64), table[:, 1], table[:, 2]
