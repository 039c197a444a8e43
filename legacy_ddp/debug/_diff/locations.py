"""Steps and phases in which things differ: what in the first of them, which names and ranks in all. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from legacy_ddp.debug._diff.result import Divergence, Place
from legacy_ddp.debug._diff.sections import Unequal, greatest
from legacy_ddp.debug._trace.line_format import PHASES

MAX_PLACES = 10
MAX_OTHERS = 10

Key = tuple[int, int]
"""Step, and position of the phase in ``PHASES``: the order of training."""


@dataclass(frozen=True)
class Mark:
    """What differs in one place, as sets of bits: on which ranks, and which of its names.

    Thousands of places may differ, each with thousands of names.
    """

    ranks: int = 0
    differing: int = 0
    names: int = 0

    def with_more(self, ranks: int, differing: int, names: int) -> "Mark":
        return Mark(self.ranks | ranks, self.differing | differing, self.names | names)


def bits_of(places: Collection[int], size: int) -> int:
    """The number whose binary digits are 1 in these places, all of them below ``size``."""
    digits = bytearray(b"0" * size)
    for place in places:
        digits[-1 - place] = ord("1")
    return int(digits or b"0", 2)


class NameBits:
    """A bit for each name of a phase, in the order in which names come."""

    def __init__(self) -> None:
        self._places: dict[int, dict[str, int]] = {}
        self._known: dict[tuple[int, tuple[str, ...]], int] = {}

    def of(self, phase: int, names: Collection[str]) -> int:
        known = self._places.setdefault(phase, {})
        places = [known.setdefault(name, len(known)) for name in names]
        return bits_of(places, len(known))

    def of_all(self, phase: int, names: tuple[str, ...]) -> int:
        """The same for names that come again and again."""
        if (phase, names) not in self._known:
            self._known[phase, names] = self.of(phase, names)
        return self._known[phase, names]


@dataclass
class _First:
    """The first place, in detail. ``rank``: the lowest, which came first."""

    key: Key
    found: list[Unequal]
    size: float | None
    ranks_of: dict[str, list[int]] = field(default_factory=dict)


class Places:
    """All places, and the first one in detail; ranks come in ascending order."""

    def __init__(self) -> None:
        self.marks: dict[Key, Mark] = {}
        self._bits = NameBits()
        self._first: _First | None = None

    def __len__(self) -> int:
        return len(self.marks)

    @property
    def first_key(self) -> Key | None:
        """The first place."""
        return self._first.key if self._first else None

    @property
    def first_step(self) -> int | None:
        """That of the first place."""
        return self._first.key[0] if self._first else None

    def may_be_first(self, key: Key) -> bool:
        """Whether no place before it is known, so that its details are wanted."""
        return self._first is None or key <= self._first.key

    def add(self, key: Key, rank: int, differing: Collection[str], names: tuple[str, ...]) -> None:
        """Take which of the names of a place differ on one rank."""
        bits = self._bits.of(key[1], differing), self._bits.of_all(key[1], names)
        self.marks[key] = self.marks.get(key, Mark()).with_more(1 << rank, *bits)

    def detail(self, key: Key, rank: int, found: Sequence[Unequal], whole: float = 0.0) -> None:
        """Take what differs on one rank in a place that may be first; ``whole``: as for :func:`greatest`."""
        if self._first is None or key < self._first.key:
            self._first = _First(key, list(found[: MAX_OTHERS + 1]), greatest(found, whole))
        for item in found:
            self._first.ranks_of.setdefault(item.name, []).append(rank)

    def divergences(self) -> list[Divergence]:
        """What differs in the first place on its lowest rank."""
        if self._first is None:
            return []
        step, phase = self._first.key
        return [
            Divergence(
                step=step,
                phase=PHASES[phase],
                name=item.name,
                kind=item.kind,
                ranks=tuple(self._first.ranks_of[item.name]),
                sides=(item.a.side("A"), item.b.side("B")),
            )
            for item in self._first.found
        ]

    @property
    def size(self) -> float | None:
        """The greatest relative difference of norms in the first place on its lowest rank."""
        return self._first.size if self._first else None


def join(marks: Mapping[Key, Mark], steps: Sequence[int]) -> tuple[tuple[Place, ...], int]:
    """The first few places, and how many are in none of them.

    Steps that follow each other in ``steps``, and in which the same names of a phase differ on the same ranks, are one
    place.
    """
    after = dict(pairwise(steps))
    runs: dict[Key, list[Key]] = {}
    latest: dict[int, list[Key]] = {}  # of each phase
    for key in sorted(marks):
        run = latest.get(key[1])
        if run is None or after.get(run[-1][0]) != key[0] or marks[run[-1]] != marks[key]:
            run = runs[key] = latest[key[1]] = []
        run.append(key)
    kept = [_place(run, marks[first]) for first, run in list(runs.items())[:MAX_PLACES]]
    return tuple(kept), len(marks) - sum(place.steps for place in kept)


def _place(run: Sequence[Key], mark: Mark) -> Place:
    step, phase = run[0]
    return Place(
        step,
        PHASES[phase],
        ranks=tuple(rank for rank in range(mark.ranks.bit_length()) if mark.ranks >> rank & 1),
        differing=mark.differing.bit_count(),
        total=mark.names.bit_count(),
        last_step=run[-1][0] if len(run) > 1 else None,
        steps=len(run),
    )
