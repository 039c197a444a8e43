"""Statistics over the rows of all ranks: equal norms, limited norms, gradient noise scale, late ranks. Pure."""

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from statistics import fmean, median
from typing import NamedTuple

# Ranks that read the same data have equal norms in every call; by chance, or with a shared batch, in fewer calls.
SUSPICIOUS_CALLS = 10
RECENT_NORMS = 32  # of a rank
_EQUAL_NORMS = 5  # of the recent norms
_NORM_TOLERANCE = 1e-5  # relative: the rounding of a clip, and the 1e-6 that torch adds to the norm

TREND_CALLS = 100  # from one report of a late rank to the next
_FEWEST_CALLS = 10  # for a report: the first calls wait for compilers and caches
_LEAST_SHARE = 0.05  # of the step, which the user could save
PARTS = {
    "data": "outside of forward and backward (data loading, optimizer step, logging)",
    "forward": "in forward",
    "backward": "in loss and backward",
}

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class NoiseScale:
    """Gradient noise of a call, per item: an item of ``sample_size``, or in a plain call the contribution of a rank.

    ``squared_norm``: estimate of ``|G|²``, for the gradient G of infinitely many items. ``noise``: estimate of tr(Σ),
    the trace of the covariance of one item's gradient. Both are unbiased but very noisy, and may be negative: average
    each over many steps before the division.

    Example:
        >>> NoiseScale(squared_norm=4.0, noise=32.0).scale
        8.0
    """

    squared_norm: float
    noise: float

    @property
    def scale(self) -> float:
        """``noise / squared_norm``: the items in a batch with as much noise as signal. Biased in a single call."""
        return self.noise / self.squared_norm if self.squared_norm else nan


def estimate_noise(local_norms: Sequence[float], sizes: Sequence[int], reduced_norm: float) -> NoiseScale:
    """Estimates from the norms of gradient sums over ``sizes`` items each, and the norm of the mean over all items.

    The formulas are in :meth:`SyncRecord.noise_scale`.
    """
    small = fmean((norm / size) * (norm / size) for norm, size in zip(local_norms, sizes, strict=True))
    big, per_item, per_batch = reduced_norm * reduced_norm, fmean(1 / size for size in sizes), 1 / sum(sizes)
    noise = (small - big) / (per_item - per_batch)
    return NoiseScale(squared_norm=big - noise * per_batch, noise=noise)


def comparable_norm(norm: float | None, finite: bool | None) -> float | None:
    """``norm`` if finite and not zero, otherwise None: equal norms then say nothing about the data."""
    return norm if finite and norm else None


def equal_ranks(values: Sequence[Hashable | None]) -> Groups:
    """Groups of two or more ranks with equal values; None is never equal."""
    ranks: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks.setdefault(value, []).append(rank)
    return tuple(tuple(group) for group in ranks.values() if len(group) > 1)


def find_straggler(seconds_waited: Sequence[float]) -> tuple[int, float] | None:
    """The rank with the shortest wait, and the difference to the median of the other ranks; None if no rank waited."""
    if len(seconds_waited) < 2 or not any(seconds_waited):
        return None
    rank = min(range(len(seconds_waited)), key=seconds_waited.__getitem__)
    return rank, -_excess(seconds_waited, rank)


def _excess(seconds: Sequence[float], rank: int) -> float:
    return seconds[rank] - median([*seconds[:rank], *seconds[rank + 1 :]])


class StepTimes(NamedTuple):
    """Times of a step. ``parts``: by the keys of ``PARTS``, seconds of every rank. ``seconds``: of the whole step.
    ``waited``: seconds of every rank in the call at the end of the step."""

    parts: Mapping[str, Sequence[float]]
    seconds: float
    waited: Sequence[float] = ()


@dataclass(frozen=True)
class LateRank:
    """The rank for which the others wait in many calls.

    It was last in ``calls`` of ``of_calls``. ``seconds``: how much longer the other ranks waited (median over all
    calls). ``share``: of the step. ``part``: the key of ``PARTS`` in which the rank took ``part_seconds`` longer than
    the others (medians); empty if no part explains half of the wait, or if parts are not known.
    """

    rank: int
    calls: int
    of_calls: int
    seconds: float
    share: float
    part: str
    part_seconds: float

    def __str__(self) -> str:
        where = f"rank {self.rank} takes {_ms(self.part_seconds)} longer than the others {PARTS.get(self.part)}"
        return (
            f"the other ranks waited for rank {self.rank} in {self.calls:,} of {self.of_calls:,} calls, "
            f"{_ms(self.seconds)} a call (median), {self.share:.0%} of the step; "
            f"{where if self.part else 'in which part of its step is not known'}"
        )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:,.1f} s"


def find_late_rank(steps: Sequence[StepTimes]) -> LateRank | None:
    """The late rank of ``steps``; None if no rank is last in half of the calls, or if the wait is short."""
    stragglers = [found[0] for step in steps if (found := find_straggler(step.waited))]
    if len(stragglers) < _FEWEST_CALLS:
        return None
    rank, calls = Counter(sorted(stragglers)).most_common(1)[0]
    seconds = -median(_excess(step.waited, rank) for step in steps)
    of_step = median(step.seconds for step in steps)
    if 2 * calls < len(steps) or not 0 < seconds < inf or not _LEAST_SHARE * of_step <= seconds:
        return None
    longer = {part: median(_excess(step.parts[part], rank) for step in steps) for part in PARTS}
    part = max(longer, key=longer.__getitem__)
    # Parts are known only with a forward of the wrapper, and with checks on.
    is_known = seconds <= 2 * longer[part] < inf and median(step.parts["forward"][rank] for step in steps) > 0
    named = (part, longer[part]) if is_known else ("", 0.0)
    return LateRank(rank, calls, len(steps), seconds, seconds / of_step if of_step else 1.0, *named)


class LateRankTrend:
    """Finds the late rank of every ``TREND_CALLS`` calls."""

    def __init__(self) -> None:
        self._last: StepTimes | None = None
        self._steps: list[StepTimes] = []

    def add(self, times: StepTimes, waited_before: Sequence[float]) -> LateRank | None:
        """Add a step. ``waited_before``: seconds of every rank in the call before, known only now."""
        if self._last is not None:
            self._steps.append(self._last._replace(waited=waited_before))
        self._last = times
        if len(self._steps) < TREND_CALLS:
            return None
        steps, self._steps = self._steps, []
        return find_late_rank(steps)


class SameDataDetector:
    """Finds ranks with equal norms in each of the last ``SUSPICIOUS_CALLS`` calls."""

    def __init__(self) -> None:
        self._calls: deque[Sequence[float | None]] = deque(maxlen=SUSPICIOUS_CALLS)

    def add(self, norms: Sequence[float | None]) -> Groups:
        """Add the comparable norms of a call. Returns the groups of ranks with equal norms."""
        if not equal_ranks(norms):
            self._calls.clear()
            return ()
        self._calls.append(norms)
        if len(self._calls) < SUSPICIOUS_CALLS:
            return ()
        # A norm that is the same in all calls (of a bias under an L1 loss, for example) does not depend on the data.
        return equal_ranks(
            [None if None in norms or len(set(norms)) == 1 else norms for norms in zip(*self._calls, strict=True)]
        )


class LimitDetector:
    """Finds norms at a limit: ``_EQUAL_NORMS`` of the recent norms of a rank are nearly equal."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_NORMS)

    def add(self, norm: float) -> bool:
        """Add the norm of a call. True if the norm is at a limit."""
        self._recent.append(norm)
        return sum(abs(each - norm) <= _NORM_TOLERANCE * norm for each in self._recent) >= _EQUAL_NORMS
