"""Tables of the recorded calls of a run, by rank and step, and statistics over them. Needs numpy."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from legacy_ddp._statistics import estimate_noise, find_straggler
from legacy_ddp.debug._page.chart import Floats
from legacy_ddp.debug._trace.read import RankTrace
from legacy_ddp.debug._trace.run import KILLED

NO_RANK = -1
# Factor between a rank's gradient norm and the median. Equally drawn batches do not reach it in half of the steps.
OUTLIER_FACTOR = 1.5
MAX_OUTLIERS = 4
_MIN_WINDOW, _MAX_WINDOW, _WINDOW_SHARE = 10, 200, 20


@dataclass(frozen=True)
class CallTable:
    """The recorded calls of a run: a row for each rank, a column for each of ``steps``, NaN for a missing call.

    ``sizes``: items in the rank's gradient, 1 in a plain call, 0 for a rank without a part in the call. ``counted``:
    ``sizes`` come from ``sample_size``. ``damaged``: the local gradient was not finite. ``waited``: in seconds.
    ``reduced_norms``: of all parameters together, NaN if not finite. ``ends``: end of each rank's trace, as text.
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


@dataclass(frozen=True)
class RankTable:
    """Values of a run: a row for each rank, a column for each of ``steps``, NaN for no value."""

    steps: NDArray[np.int64]
    values: Floats

    @property
    def world_size(self) -> int:
        return len(self.values)


class RankCalls:
    """The recorded calls of one rank, in columns."""

    def __init__(self, trace: RankTrace) -> None:
        steps, damaged = array("q"), array("b")
        norms, waited, sizes = array("d"), array("d"), array("d")
        self.counted = False
        for step in trace.steps:
            call = trace.call(step)
            if call is None:
                continue
            steps.append(step)
            # The recorded norm leaves non-finite elements out.
            norms.append(nan if call.local_norm is None or call.finite is False else call.local_norm)
            damaged.append(call.finite is False)
            waited.append(call.seconds_waited)
            sample_size = 1 if call.sample_size is None else call.sample_size
            sizes.append(sample_size if call.took_part else 0)
            self.counted |= call.sample_size is not None
        self.steps = np.array(steps, dtype=np.int64)
        self.damaged = np.array(damaged, dtype=np.bool_)
        self.columns = [np.array(values, dtype=np.float64) for values in (norms, waited, sizes)]
        self.end = _end(trace)


def _end(trace: RankTrace) -> str:
    if trace.damage:
        return f"damaged: {trace.damage}"
    if trace.torn:
        return "last line torn: killed while it wrote"
    return trace.end or f"no last line: {KILLED}"


def call_table(ranks: Sequence[RankCalls], reduced_norms: Mapping[int, float]) -> CallTable:
    """The calls of all ranks, over the steps of any rank. ``reduced_norms``: by step."""
    steps = np.unique(np.concatenate([rank.steps for rank in ranks]))
    damaged = np.zeros((len(ranks), len(steps)), dtype=np.bool_)
    tables = [np.full((len(ranks), len(steps)), np.nan) for _ in range(3)]
    for row, rank in enumerate(ranks):
        columns = np.searchsorted(steps, rank.steps)
        damaged[row, columns] = rank.damaged
        for table, values in zip(tables, rank.columns, strict=True):
            table[row, columns] = values
    local_norms, waited, sizes = tables
    return CallTable(
        steps=steps,
        local_norms=local_norms,
        damaged=damaged,
        waited=waited,
        sizes=sizes,
        reduced_norms=np.array([reduced_norms.get(int(step), nan) for step in steps], dtype=np.float64),
        counted=any(rank.counted for rank in ranks),
        ends=tuple(rank.end for rank in ranks),
    )


@dataclass(frozen=True)
class Straggler:
    """A rank for which the other ranks waited. ``times``: number of steps.

    ``median_seconds`` and ``seconds``: median and sum, over these steps, of the wait of the median other rank.
    """

    rank: int
    times: int
    median_seconds: float
    seconds: float


def stragglers_by_step(waited: Floats) -> tuple[NDArray[np.intp], Floats]:
    """For each step the rank with the shortest wait, and the difference to the median wait of the other ranks.

    ``NO_RANK`` and NaN for a step without a straggler or with an unknown wait.
    """
    ranks = np.full(waited.shape[1], NO_RANK, dtype=np.intp)
    seconds = np.full(waited.shape[1], np.nan)
    for column in np.flatnonzero(~np.isnan(waited).any(axis=0)):
        found = find_straggler(waited[:, column].tolist())
        if found is not None:
            ranks[column], seconds[column] = found
    return ranks, seconds


def stragglers(waited: Floats) -> list[Straggler]:
    """All stragglers, the costliest first."""
    ranks, seconds = stragglers_by_step(waited)
    found = []
    for rank in np.unique(ranks[ranks != NO_RANK]):
        cost = seconds[ranks == rank]
        found.append(Straggler(int(rank), len(cost), float(np.median(cost)), float(cost.sum())))
    return sorted(found, key=lambda item: (-item.seconds, item.rank))


def outliers(local_norms: Floats) -> list[int]:
    """Ranks off the median of all ranks by ``OUTLIER_FACTOR`` in half of the steps, the furthest first."""
    known = np.where(local_norms > 0, local_norms, np.nan)
    known = known[:, ~np.isnan(known).all(axis=0)]
    distances = np.abs(np.log(known / np.nanmedian(known, axis=0)))
    medians = np.array([np.median(row[~np.isnan(row)]) if not np.isnan(row).all() else 0.0 for row in distances])
    order = np.argsort(-medians, kind="stable")
    return [int(rank) for rank in order[:MAX_OUTLIERS] if medians[rank] >= np.log(OUTLIER_FACTOR)]


def missing_noise_reason(calls: CallTable) -> str:
    """The reason for a missing noise scale; empty if there is a noise scale."""
    if calls.world_size < 2:
        return "it compares ranks, and there is only one"
    if not len(_estimates(calls)[0]):
        return "in no step do two ranks that took part, and the reduced gradient, have a finite norm in the trace"
    return ""


def noise_window(steps: int) -> int:
    """Number of steps to average, of a run with this number of steps."""
    return min(steps, _MAX_WINDOW, max(_MIN_WINDOW, steps // _WINDOW_SHARE))


def noise_scales(calls: CallTable) -> tuple[NDArray[np.int64], Floats, int]:
    """Steps, the noise scale at each step, and the number of estimates averaged for each.

    Signal and noise are averaged before the division. NaN if an average is not positive.
    """
    steps, signal, noise = _estimates(calls)
    window = noise_window(len(steps))
    if not window:
        return steps, signal, 0
    windows = np.lib.stride_tricks.sliding_window_view
    mean_signal, mean_noise = windows(signal, window).mean(axis=1), windows(noise, window).mean(axis=1)
    positive = (mean_signal > 0) & (mean_noise > 0)
    scales = np.full(len(mean_signal), np.nan)
    scales[positive] = mean_noise[positive] / mean_signal[positive]
    return steps[window - 1 :], scales, window


def _estimates(calls: CallTable) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Step, |G|² and tr(Σ), for all steps with an estimate."""
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
