"""What do the rows of all ranks say together: who looks alike, how noisy are the gradients, who is late? Pure."""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import nan
from statistics import fmean, median

# A chance or a batch that is meant to be shared does not last so long; data that are read twice do.
SUSPICIOUS_CALLS = 10

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class NoiseScale:
    """What one call tells about the noise of gradients, in items (of ``sample_size``, or ranks' contributions).

    ``squared_norm``: estimate of |G|², of the gradient that infinitely many items would give. ``noise``: estimate of
    tr(Σ), the trace of the covariance of one item's gradient. Both are unbiased and very noisy, and may be negative:
    average each over many steps, and divide then.
    """

    squared_norm: float
    noise: float

    @property
    def scale(self) -> float:
        """``noise / squared_norm``: items in a batch at which noise and signal are alike; biased, see above."""
        return self.noise / self.squared_norm if self.squared_norm else nan


def estimate_noise(local_norms: Sequence[float], sizes: Sequence[int], reduced_norm: float) -> NoiseScale:
    """Estimates from summed gradients over ``sizes`` items each, and from the mean over all items.

    The formulas are in :meth:`SyncRecord.noise_scale`.
    """
    small = fmean((norm / size) * (norm / size) for norm, size in zip(local_norms, sizes, strict=True))
    big, per_item, per_batch = reduced_norm * reduced_norm, fmean(1 / size for size in sizes), 1 / sum(sizes)
    noise = (small - big) / (per_item - per_batch)
    return NoiseScale(squared_norm=big - noise * per_batch, noise=noise)


def comparable_norm(norm: float | None, finite: bool | None) -> float | None:
    """``norm`` if being equal to another one means anything."""
    return norm if finite and norm else None


def equal_ranks(marks: Sequence[Hashable | None]) -> Groups:
    """Groups of two or more ranks with equal marks; None equals nothing."""
    ranks: dict[Hashable, list[int]] = {}
    for rank, mark in enumerate(marks):
        if mark is not None:
            ranks.setdefault(mark, []).append(rank)
    return tuple(tuple(group) for group in ranks.values() if len(group) > 1)


def find_straggler(seconds_waited: Sequence[float]) -> tuple[int, float] | None:
    """The rank that waited least, and how much longer the median of the others did; None if nobody waited."""
    if len(seconds_waited) < 2 or not any(seconds_waited):
        return None
    rank = min(range(len(seconds_waited)), key=seconds_waited.__getitem__)
    return rank, median([*seconds_waited[:rank], *seconds_waited[rank + 1 :]]) - seconds_waited[rank]


class SameDataDetector:
    """The ranks whose norms were equal in each of the last ``SUSPICIOUS_CALLS`` calls."""

    def __init__(self) -> None:
        # Empty from the first call on in which all differ, so that ordinary calls cost one dictionary.
        self._calls: deque[Sequence[float | None]] = deque(maxlen=SUSPICIOUS_CALLS)

    def add(self, norms: Sequence[float | None]) -> Groups:
        """Take the comparable norms of one more call in."""
        if not equal_ranks(norms):
            self._calls.clear()
            return ()
        self._calls.append(norms)
        if len(self._calls) < SUSPICIOUS_CALLS:
            return ()
        # A norm that never changes (of a bias under an L1 loss, say) does not follow from data at all.
        return equal_ranks(
            [None if None in seen or len(set(seen)) == 1 else seen for seen in zip(*self._calls, strict=True)]
        )
