"""Where do things differ: which steps and phases, and what in the first few of them? Collected rank by rank. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from legacy_ddp._diff.finding import Divergence, Place
from legacy_ddp._diff.sections import Unequal, greatest
from legacy_ddp._trace.lines import PHASES

MAX_PLACES = 10
MAX_OTHERS = 10

Key = tuple[int, int]
"""Step, and position of the phase in ``PHASES``: the order of training."""


@dataclass
class _Kept:
    rank: int  # the lowest: it came first
    first: list[Unequal]
    size: float | None
    total: int
    ranks: list[int] = field(default_factory=list)
    ranks_of: dict[str, list[int]] = field(default_factory=dict)


class Places:
    """All places, and the first few in detail; ranks come in ascending order."""

    def __init__(self) -> None:
        self._keys: set[Key] = set()
        self._kept: dict[Key, _Kept] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def first_key(self) -> Key | None:
        """The first place."""
        return min(self._kept, default=None)

    @property
    def first_step(self) -> int | None:
        """That of the first place."""
        return min(self._kept)[0] if self._kept else None

    def count_from(self, first: Key) -> int:
        """How many there are from that one on."""
        return sum(key >= first for key in self._keys)

    def add(self, key: Key) -> bool:
        """Count a place; whether it is among the first few, so that its details are wanted."""
        self._keys.add(key)
        return len(self._kept) < MAX_PLACES or key <= max(self._kept)

    def detail(self, key: Key, rank: int, found: Sequence[Unequal], total: int, whole: float = 0.0) -> None:
        """Take what differs there on one rank; ``whole``: as for :func:`greatest`."""
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _Kept(rank, list(found[: MAX_OTHERS + 1]), greatest(found, whole), total)
            if len(self._kept) > MAX_PLACES:
                del self._kept[max(self._kept)]
        kept.ranks.append(rank)
        kept.total = max(kept.total, total)
        for item in found:
            kept.ranks_of.setdefault(item.name, []).append(rank)

    def divergences(self) -> list[Divergence]:
        """What differs in the first place on its lowest rank."""
        if not self._kept:
            return []
        step, phase = key = min(self._kept)
        kept = self._kept[key]
        return [
            Divergence(
                step=step,
                phase=PHASES[phase],
                name=item.name,
                kind=item.kind,
                ranks=tuple(kept.ranks_of[item.name]),
                sides=(item.a.side("A"), item.b.side("B")),
            )
            for item in kept.first
        ]

    @property
    def size(self) -> float | None:
        """The greatest relative difference of norms in the first place on its lowest rank."""
        return self._kept[min(self._kept)].size if self._kept else None

    def places(self) -> tuple[Place, ...]:
        """The first few."""
        return tuple(
            Place(step, PHASES[phase], tuple(kept.ranks), len(kept.ranks_of), kept.total)
            for (step, phase), kept in sorted(self._kept.items())
        )
