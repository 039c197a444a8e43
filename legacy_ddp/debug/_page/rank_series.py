"""What do the calls of a run say together: who was last, who stands out, how noisy are gradients? Pure; needs numpy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from legacy_ddp._statistics import estimate_noise, find_straggler
from legacy_ddp.debug._page.binning import Floats

NOBODY = -1
# A factor between one rank's gradient and the median that batches drawn alike do not have in half of all steps.
STANDS_OUT = 1.5
MOST_STANDING_OUT = 4
LEAST_WINDOW, MOST_WINDOW, WINDOW_SHARE = 10, 200, 20


@dataclass(frozen=True)
class Calls:
    """The host's side of the recorded calls of a run: a row for each rank, a column for each of ``steps``.

    NaN where a rank has none. ``sizes``: items in its gradient, 1 in a plain call, 0 where it took no part.
    ``damaged``: its own gradient was not finite. ``reduced_norms``: of all parameters together, NaN where it is not
    finite. ``counted``: ``sizes`` come from ``sample_size``. ``ends``: how each rank's trace ends, in words.
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
class Lateness:
    """How often a rank was the one that the others waited for, and how long the median of them did.

    ``median_seconds``: in the middle of those steps; ``seconds``: in all of them together.
    """

    rank: int
    times: int
    median_seconds: float
    seconds: float


def last_ranks(waited: Floats) -> tuple[NDArray[np.intp], Floats]:
    """For each step the rank that waited least, and how much longer the median of the others did.

    ``NOBODY`` and NaN where nobody waited, or a rank's time is not known.
    """
    ranks = np.full(waited.shape[1], NOBODY, dtype=np.intp)
    seconds = np.full(waited.shape[1], np.nan)
    for column in np.flatnonzero(~np.isnan(waited).any(axis=0)):
        found = find_straggler(waited[:, column].tolist())
        if found is not None:
            ranks[column], seconds[column] = found
    return ranks, seconds


def lateness(waited: Floats) -> list[Lateness]:
    """Of every rank that was ever the last, the one that cost most first."""
    ranks, seconds = last_ranks(waited)
    found = []
    for rank in np.unique(ranks[ranks != NOBODY]):
        cost = seconds[ranks == rank]
        found.append(Lateness(int(rank), len(cost), float(np.median(cost)), float(cost.sum())))
    return sorted(found, key=lambda late: (-late.seconds, late.rank))


def standing_out(local_norms: Floats) -> list[int]:
    """The ranks off the median of all by a factor of ``STANDS_OUT`` in half of the steps, the furthest first."""
    known = np.where(local_norms > 0, local_norms, np.nan)
    known = known[:, ~np.isnan(known).all(axis=0)]
    off = np.abs(np.log(known / np.nanmedian(known, axis=0)))
    factors = np.array([np.median(row[~np.isnan(row)]) if not np.isnan(row).all() else 0.0 for row in off])
    order = np.argsort(-factors, kind="stable")
    return [int(rank) for rank in order[:MOST_STANDING_OUT] if factors[rank] >= np.log(STANDS_OUT)]


def why_no_noise(calls: Calls) -> str:
    """Why there is no noise scale, empty if there is one."""
    if calls.world_size < 2:
        return "it compares ranks, and there is only one"
    if not len(_estimates(calls)[0]):
        return "in no step do two ranks that took part, and the reduced gradient, have a finite norm in the trace"
    return ""


def noise_window(steps: int) -> int:
    """Over how many of so many steps to average."""
    return min(steps, MOST_WINDOW, max(LEAST_WINDOW, steps // WINDOW_SHARE))


def noise_scales(calls: Calls) -> tuple[NDArray[np.int64], Floats, int]:
    """Steps, the noise scale up to each, and the number of estimates that were averaged for it.

    Both parts are averaged before they are divided. NaN where an averaged part is not positive.
    """
    steps, signal, noise = _estimates(calls)
    window = noise_window(len(steps))
    if not window:
        return steps, signal, 0
    over = np.lib.stride_tricks.sliding_window_view
    mean_signal, mean_noise = over(signal, window).mean(axis=1), over(noise, window).mean(axis=1)
    positive = (mean_signal > 0) & (mean_noise > 0)
    scales = np.full(len(mean_signal), np.nan)
    scales[positive] = mean_noise[positive] / mean_signal[positive]
    return steps[window - 1 :], scales, window


def _estimates(calls: Calls) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Of the steps in which there is one: step, |G|² and tr(Σ)."""
    found = []
    for column, step in enumerate(calls.steps):
        part = calls.sizes[:, column] > 0
        norms, reduced = calls.local_norms[part, column], calls.reduced_norms[column]
        known = not np.isnan(calls.sizes[:, column]).any() and not calls.damaged[part, column].any()
        if known and len(norms) > 1 and not np.isnan(norms).any() and not np.isnan(reduced):
            sizes = [int(size) for size in calls.sizes[part, column]]
            estimate = estimate_noise(norms.tolist(), sizes, float(reduced))
            # Norms beyond 1e154 have no square in a float64.
            if np.isfinite([estimate.squared_norm, estimate.noise]).all():
                found.append((step, estimate.squared_norm, estimate.noise))
    table = np.array(found, dtype=np.float64).reshape(-1, 3)
    return np.array([step for step, _, _ in found], dtype=np.int64), table[:, 1], table[:, 2]
