"""Statistics over the rows of all ranks: equal norms, limited norms, gradient noise scale, straggler. Pure."""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import nan
from statistics import fmean, median

# By chance, or with a batch shared on purpose, norms are equal in fewer calls. Ranks that read the same data have
# equal norms in every call.
SUSPICIOUS_CALLS = 10
RECENT_NORMS = 32  # of a rank
_EQUAL_NORMS = 5  # of the recent norms
_NORM_TOLERANCE = 1e-5  # relative: the rounding of a clip, and the 1e-6 that torch adds to the norm

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class NoiseScale:
    """Gradient noise of a call. The unit is an item: of ``sample_size``, or in a plain call a rank's contribution.

    ``squared_norm``: estimate of ``|G|²``, for the gradient G of infinitely many items. ``noise``: estimate of tr(Σ),
    the trace of the covariance of one item's gradient. Both are unbiased and very noisy, and may be negative: average
    each over many steps before the division.

    Example:
        >>> NoiseScale(squared_norm=4.0, noise=32.0).scale
        8.0
    """

    squared_norm: float
    noise: float

    @property
    def scale(self) -> float:
        """``noise / squared_norm``: items in a batch with as much noise as signal; biased, see above."""
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
    """``norm`` if finite and not zero, otherwise None: then equality means nothing."""
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
    return rank, median([*seconds_waited[:rank], *seconds_waited[rank + 1 :]]) - seconds_waited[rank]


class SameDataDetector:
    """Finds ranks with equal norms in each of the last ``SUSPICIOUS_CALLS`` calls."""

    def __init__(self) -> None:
        self._calls: deque[Sequence[float | None]] = deque(maxlen=SUSPICIOUS_CALLS)

    def add(self, norms: Sequence[float | None]) -> Groups:
        """Add the comparable norms of a call. Returns the groups of ranks found, if any."""
        if not equal_ranks(norms):
            self._calls.clear()
            return ()
        self._calls.append(norms)
        if len(self._calls) < SUSPICIOUS_CALLS:
            return ()
        # A norm that never changes (of a bias under an L1 loss, for example) does not depend on the data.
        return equal_ranks(
            [None if None in norms or len(set(norms)) == 1 else norms for norms in zip(*self._calls, strict=True)]
        )


class LimitDetector:
    """Finds norms at a limit: ``_EQUAL_NORMS`` of the recent norms of a rank are nearly equal."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_NORMS)

    def add(self, norm: float) -> bool:
        """Add the norm of a call. Returns whether the norm is at a limit."""
        self._recent.append(norm)
        return sum(abs(each - norm) <= _NORM_TOLERANCE * norm for each in self._recent) >= _EQUAL_NORMS
