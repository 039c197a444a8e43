"""What do traces hold that a page shows? Every file is read once, of sections only those that it shows. Needs numpy."""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import hypot, isfinite, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legacy_ddp.debug._page.binning import MOST_ROWS, Bins, Cells, Floats, Grid, Positions
from legacy_ddp.debug._page.rank_series import Calls
from legacy_ddp.debug._trace.read import Progress, RankTrace
from legacy_ddp.debug._trace.records import Names, Section
from legacy_ddp.debug._trace.run import Run

# What the ranks of a run hold alike. A row of the page is a parameter, and stands for both.
SHOWN = ("reduced_gradients", "parameters")
_PREFIXES = ("gradient of ", "parameter ")


class Heat:
    """What became of every parameter in every step.

    Of one run: the norm of its reduced gradient on rank 0, ``cells.marked`` where ranks differ. Of two: how far apart
    norms are, of gradient or parameter, 0 where they are equal; ``cells.marked`` where bits differ. ``names``: of
    parameters, in the order of the trace.
    """

    def __init__(self, names: Sequence[str], grid: Grid) -> None:
        self.names = tuple(names)
        self.grid = grid
        self.cells = Cells(Bins.at_most(len(self.names), MOST_ROWS), grid.count)
        self._places = {name: index for index, name in enumerate(self.names)}
        self._known: dict[Names, Positions] = {}

    def places(self, names: Names) -> Positions:
        """Which parameters the entries of a section belong to; of one that no rank 0 has, the place behind the last."""
        if names not in self._known:
            found = [self._places.get(_parameter(name), len(self.names)) for name in names.names]
            self._known[names] = np.array(found, dtype=np.intp)
        return self._known[names]

    def held(self, section: Section) -> tuple[NDArray[Any], Floats]:
        """Words and norms of every parameter, None and NaN for what has none."""
        places = self.places(section.names)
        words = np.full(len(self.names) + 1, None, dtype=object)
        words[places] = section.values.words
        norms = np.full(len(self.names) + 1, np.nan)
        norms[places] = section.values.norms  # numpy makes NaN of None
        return words[:-1], norms[:-1]

    def put(self, step: int, values: Floats) -> None:
        self.cells.put(self.grid.column(step), values)

    def mark(self, step: int, differ: NDArray[np.bool_]) -> None:
        self.cells.mark(self.grid.column(step), np.flatnonzero(differ))

    def count(self, step: int, section: Section) -> None:
        places = self.places(section.names)
        counts = {int(places[index]): number for index, number in section.values.nonfinite.items()}
        counts.pop(len(self.names), None)
        self.cells.count(self.grid.column(step), counts)


@dataclass(frozen=True)
class Series:
    """``heat``: of all runs together. ``calls``: of each. ``every_rank``: all were compared, not only rank 0."""

    heat: Heat
    calls: tuple[Calls, ...]
    every_rank: bool


def read_series(runs: Sequence[Run], progress: Progress = lambda _: None) -> Series:
    """What a page shows of one run, or of two. At most four files are open at a time.

    Raises:
        TraceError: a file cannot be read.
    """
    with ExitStack() as opened:
        firsts = [opened.enter_context(run.open(0, progress)) for run in runs]
        heat = Heat(_parameters(firsts), _grid(firsts))
        reduced = [_take_norms(heat, first, shown=len(runs) == 1) for first in firsts]
        if len(runs) == 2:
            _take_distances(heat, firsts[0], firsts[1])
        calls = [[_RankCalls(first)] for first in firsts]
        every_rank = len({run.world_size for run in runs}) == 1
        for rank in range(1, max(run.world_size for run in runs)):
            with ExitStack() as closing:
                having = [number for number, run in enumerate(runs) if rank < run.world_size]
                others = [closing.enter_context(runs[number].open(rank, progress)) for number in having]
                for number, other in zip(having, others, strict=True):
                    calls[number].append(_RankCalls(other))
                if len(runs) == 1:
                    _take_differences(heat, firsts[0], others[0])
                elif every_rank:
                    _take_distances(heat, others[0], others[1], known=(firsts[0], firsts[1]))
    joined = tuple(_joined(ranks, norms) for ranks, norms in zip(calls, reduced, strict=True))
    return Series(heat, joined, every_rank)


def _take_norms(heat: Heat, trace: RankTrace, *, shown: bool) -> dict[int, float]:
    """The norm of the whole reduced gradient, by step, where it is finite."""
    found = {}
    for step in trace.steps:
        section = trace.section(step, "reduced_gradients")
        if section is None:
            continue
        if shown:
            heat.put(step, heat.held(section)[1])
        heat.count(step, section)
        held = [norm for norm in section.values.norms if norm is not None]
        if held and not section.values.nonfinite and isfinite(whole := hypot(*held)):
            found[step] = whole
    return found


def _take_differences(heat: Heat, first: RankTrace, other: RankTrace) -> None:
    """Mark what two ranks of a run hold differently."""
    for step, one, two in _different(first, other):
        heat.mark(step, heat.held(one)[0] != heat.held(two)[0])
        heat.count(step, two)


def _take_distances(heat: Heat, a: RankTrace, b: RankTrace, known: tuple[RankTrace, RankTrace] | None = None) -> None:
    """How far apart two runs are, on one rank. ``known``: another one; where it holds the same, nothing is new."""
    for step, phase in _common(a, b):
        heat.put(step, _where(heat, a, step, phase))
    for step, one, two in _different(a, b, known):
        (words, norms), (other_words, other_norms) = heat.held(one), heat.held(two)
        differ = words != other_words
        heat.put(step, np.where(differ, _apart(norms, other_norms), np.nan))
        heat.mark(step, differ)
        heat.count(step, one)
        heat.count(step, two)


def _where(heat: Heat, trace: RankTrace, step: int, phase: str) -> Floats:
    """0 for the parameters that are in a section; it is not read if it can be said without."""
    declared = trace.declared(phase)
    values = np.full(len(heat.names) + 1, np.nan)
    if len(declared) == 1:
        values[heat.places(declared[0])] = 0.0
    elif section := trace.section(step, phase):
        values[heat.places(section.names)] = 0.0
    return values[:-1]


def _apart(norms: Floats, others: Floats) -> Floats:
    """By how much of the larger one two norms differ; 1 where only one is there, 0 where neither is."""
    both = np.fmax(norms, others)
    lone = np.isnan(norms) != np.isnan(others)
    distance = np.divide(np.abs(norms - others), both, out=np.zeros(len(both)), where=both > 0)
    return np.where(lone, 1.0, np.nan_to_num(distance, nan=0.0))


def _common(a: RankTrace, b: RankTrace) -> Iterator[tuple[int, str]]:
    """The steps and phases that both have."""
    for step in a.steps:
        for phase in SHOWN:
            if a.digest(step, phase) is not None and b.digest(step, phase) is not None:
                yield step, phase


def _different(
    a: RankTrace, b: RankTrace, known: tuple[RankTrace, RankTrace] | None = None
) -> Iterator[tuple[int, Section, Section]]:
    """The sections that differ, of those that both have."""
    for step, phase in _common(a, b):
        words = a.digest(step, phase), b.digest(step, phase)
        if words[0] == words[1] or (known and words == tuple(trace.digest(step, phase) for trace in known)):
            continue
        one, two = a.section(step, phase), b.section(step, phase)
        if one is not None and two is not None:
            yield step, one, two


def _parameters(traces: Sequence[RankTrace]) -> list[str]:
    declared = [names.names for trace in traces for phase in SHOWN for names in trace.declared(phase)]
    return list(dict.fromkeys(_parameter(name) for names in declared for name in names))


def _parameter(name: str) -> str:
    """What follows ``gradient of`` or ``parameter``: the same for both."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def _grid(traces: Sequence[RankTrace]) -> Grid:
    begun = [(trace.environment.first_step, trace.steps) for trace in traces]
    return Grid.of(
        {step for first, steps in begun for step in steps if step >= first},
        {step for first, steps in begun for step in steps if step < first},
    )


class _RankCalls:
    """What one rank's calls say, by step."""

    def __init__(self, trace: RankTrace) -> None:
        found, damaged = array("q"), array("b")
        norms, waited, sizes = array("d"), array("d"), array("d")
        self.counted = False
        for step in trace.steps:
            call = trace.call(step)
            if call is None:
                continue
            found.append(step)
            # The norm of what is finite says nothing about a gradient that is not.
            norms.append(nan if call.local_norm is None or call.finite is False else call.local_norm)
            damaged.append(call.finite is False)
            waited.append(call.seconds_waited)
            sizes.append(_size(call.took_part, call.sample_size))
            self.counted |= call.sample_size is not None
        self.steps = np.array(found, dtype=np.int64)
        self.damaged = np.array(damaged, dtype=np.bool_)
        self.columns = [np.array(values, dtype=np.float64) for values in (norms, waited, sizes)]
        self.end = _end(trace)


def _size(took_part: bool, sample_size: int | None) -> int:
    if not took_part:
        return 0
    return 1 if sample_size is None else sample_size


def _end(trace: RankTrace) -> str:
    if trace.damage:
        return f"damaged: {trace.damage}"
    if trace.torn:
        return "last line torn: killed while it wrote"
    return trace.end or "no last line: killed, or still running"


def _joined(ranks: Sequence[_RankCalls], reduced: dict[int, float]) -> Calls:
    """A table of all ranks over the steps that any of them has."""
    steps = np.unique(np.concatenate([rank.steps for rank in ranks]))
    damaged = np.zeros((len(ranks), len(steps)), dtype=np.bool_)
    tables = [np.full((len(ranks), len(steps)), np.nan) for _ in range(3)]
    for row, rank in enumerate(ranks):
        columns = np.searchsorted(steps, rank.steps)
        damaged[row, columns] = rank.damaged
        for table, values in zip(tables, rank.columns, strict=True):
            table[row, columns] = values
    local_norms, waited, sizes = tables
    return Calls(
        steps=steps,
        local_norms=local_norms,
        damaged=damaged,
        waited=waited,
        sizes=sizes,
        reduced_norms=np.array([reduced.get(int(step), nan) for step in steps], dtype=np.float64),
        counted=any(rank.counted for rank in ranks),
        ends=tuple(rank.end for rank in ranks),
    )
