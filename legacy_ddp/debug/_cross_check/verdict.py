"""The verdict about digests of runs: which ranks compute differently. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Digests = tuple[int, ...]
Kind = Literal["equal", "differs", "once", "nondeterministic"]
RING, REPEAT, LATER_REPEAT = "ring", "repeat", "later repeat"


@dataclass(frozen=True)
class Witness:
    """A run of the examined batch: on ``rank``, in the ring of all batches, or in the first or second repetition."""

    rank: int
    run: str


@dataclass(frozen=True)
class Verdict:
    """``ranks``: the ranks with a different computation; without a majority the ranks of all sides.

    ``groups``: the ranks with equal results, the largest group first. ``odd``, ``reference``: two runs with different
    results, the first on one of ``ranks``.
    """

    kind: Kind
    ranks: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    odd: Witness | None = None
    reference: Witness | None = None

    @property
    def is_attributed(self) -> bool:
        """Whether ``ranks`` are outside of a majority, or disagree with themselves."""
        return self.kind in ("once", "nondeterministic") or len(self.groups[0]) > sum(map(len, self.groups[1:]))


def differing_batches(own: Sequence[Digests | None], foreign: Sequence[Digests | None]) -> list[int]:
    """The ranks with a batch of different results on the two ranks.

    ``own[r]``: of the batch of rank r on rank r. ``foreign[r]``: of the batch of the rank before r, on rank r. None
    without a batch.
    """
    size = len(own)
    return [rank for rank in range(size) if own[rank] != foreign[(rank + 1) % size]]


def choose_batch(batches: Sequence[int], size: int) -> int:
    """The batch to examine: of a rank common to two disagreements, otherwise the first.

    A rank with a constant fault disagrees about its own batch and about the batch before.
    """
    common = [rank for rank in batches if (rank - 1) % size in batches]
    return common[0] if common else batches[0]


def judge(batch: int, own: Digests, foreign: Digests, repeats: Sequence[tuple[Digests, Digests]]) -> Verdict:
    """The verdict about one batch.

    ``own``, ``foreign``: of the batch on its rank and on the next rank. ``repeats[r]``: of two runs of the batch on
    rank r afterwards.
    """
    unstable = tuple(rank for rank, (first, second) in enumerate(repeats) if first != second)
    if unstable:
        odd, reference = Witness(unstable[0], REPEAT), Witness(unstable[0], LATER_REPEAT)
        return Verdict("nondeterministic", unstable, _group([first for first, _ in repeats]), odd, reference)
    values = [first for first, _ in repeats]
    groups = _group(values)
    if len(groups) > 1:
        has_majority = len(groups[0]) > sum(map(len, groups[1:]))
        ranks = tuple(sorted(rank for group in groups[has_majority:] for rank in group))
        return Verdict("differs", ranks, groups, Witness(groups[1][0], REPEAT), Witness(groups[0][0], REPEAT))
    pair = {batch: own, (batch + 1) % len(repeats): foreign}
    changed = tuple(sorted(rank for rank, digests in pair.items() if digests != values[0]))
    if len(repeats) == 1:
        changed = (0,)
    return Verdict("once", changed, groups, Witness(changed[0], RING), Witness(changed[0], REPEAT))


def _group(values: Sequence[Digests]) -> tuple[tuple[int, ...], ...]:
    """The ranks with equal values, the largest group first; of equal groups the group with the lowest rank first."""
    groups: dict[Digests, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return tuple(sorted(map(tuple, groups.values()), key=lambda ranks: (-len(ranks), ranks)))
