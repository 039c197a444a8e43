"""Steps and phases with differences: details of the first, differing names and ranks of all."""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, pairwise

from legacy_ddp._compare import group_ranks, name_ranks, outside_majority
from legacy_ddp.debug._diff.pair import ABSENT, Entry, EntryDifference, Keep, entries, greatest_difference
from legacy_ddp.debug._diff.result import Divergence, Location
from legacy_ddp.debug._trace.records import PHASES
from legacy_ddp.debug._trace.run import Run

MAX_LOCATIONS = 10
MAX_OTHERS = 10

Key = tuple[int, int]
"""Step, and index of the phase in ``PHASES``: sorts in the order of training."""

_LIKE_RANK_0 = 0
_Group = tuple[Entry, list[int]]
"""An entry, and the ranks which hold it."""


@dataclass(frozen=True)
class LocationMask:
    """Ranks with a difference, differing names and all names of one step and phase, as bit masks.

    Masks keep memory small: thousands of locations may differ, each with thousands of names.
    """

    ranks: int = 0
    differing: int = 0
    names: int = 0

    def union(self, ranks: int, differing: int, names: int) -> "LocationMask":
        return LocationMask(self.ranks | ranks, self.differing | differing, self.names | names)


def bit_mask(indices: Collection[int], size: int) -> int:
    """The number with these bits set, all below ``size``."""
    digits = bytearray(b"0" * size)
    for index in indices:
        digits[-1 - index] = ord("1")
    return int(digits or b"0", 2)


class NameMasks:
    """Bit masks of names: every name of a phase has a bit, in the order of arrival."""

    def __init__(self) -> None:
        self._indices: dict[int, dict[str, int]] = {}
        self._cache: dict[tuple[int, tuple[str, ...]], int] = {}

    def mask(self, phase: int, names: Collection[str]) -> int:
        known = self._indices.setdefault(phase, {})
        indices = [known.setdefault(name, len(known)) for name in names]
        return bit_mask(indices, len(known))

    def cached_mask(self, phase: int, names: tuple[str, ...]) -> int:
        """:meth:`mask` with a cache, for tuples of names which repeat in every step."""
        if (phase, names) not in self._cache:
            self._cache[phase, names] = self.mask(phase, names)
        return self._cache[phase, names]


@dataclass
class _FirstLocation:
    """Details of the first location, taken from its lowest rank; ``ranks_of``: differing ranks by name."""

    key: Key
    differences: list[EntryDifference]
    size: float | None
    ranks_of: dict[str, list[int]] = field(default_factory=dict)


class Locations:
    """All locations, with details of the first. Ranks are added in ascending order."""

    def __init__(self) -> None:
        self.masks: dict[Key, LocationMask] = {}
        self._names = NameMasks()
        self._first: _FirstLocation | None = None

    def __len__(self) -> int:
        return len(self.masks)

    @property
    def first_key(self) -> Key | None:
        return self._first.key if self._first else None

    @property
    def first_step(self) -> int | None:
        return self._first.key[0] if self._first else None

    def may_be_first(self, key: Key) -> bool:
        """Whether no earlier location is known, so that :meth:`add_details` is wanted."""
        return self._first is None or key <= self._first.key

    def add(self, key: Key, rank: int, differing: Collection[str], names: tuple[str, ...]) -> None:
        """Add the differing names, among ``names``, of one rank."""
        masks = self._names.mask(key[1], differing), self._names.cached_mask(key[1], names)
        self.masks[key] = self.masks.get(key, LocationMask()).union(1 << rank, *masks)

    def add_details(self, key: Key, rank: int, differences: Sequence[EntryDifference], total: float = 0.0) -> None:
        """Add the differences of one rank in a possibly first location; ``total``: see :func:`greatest_difference`."""
        if self._first is None or key < self._first.key:
            kept = list(differences[: MAX_OTHERS + 1])
            self._first = _FirstLocation(key, kept, greatest_difference(differences, total))
        for item in differences:
            self._first.ranks_of.setdefault(item.name, []).append(rank)

    def divergences(self) -> list[Divergence]:
        """The divergences in the first location, on its lowest rank."""
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
            for item in self._first.differences
        ]

    @property
    def size(self) -> float | None:
        """The greatest relative difference of norms in the first location, on its lowest rank."""
        return self._first.size if self._first else None


def merge(masks: Mapping[Key, LocationMask], steps: Sequence[int]) -> tuple[tuple[Location, ...], int]:
    """The first few locations, and the number of steps and phases with differences beyond them.

    Steps are merged into one location if they are consecutive in ``steps`` and have equal masks in a phase.
    """
    next_step = dict(pairwise(steps))
    runs: dict[Key, list[Key]] = {}
    latest: dict[int, list[Key]] = {}  # by phase
    for key in sorted(masks):
        run = latest.get(key[1])
        if run is None or next_step.get(run[-1][0]) != key[0] or masks[run[-1]] != masks[key]:
            run = runs[key] = latest[key[1]] = []
        run.append(key)
    kept = [_location(run, masks[first]) for first, run in list(runs.items())[:MAX_LOCATIONS]]
    return tuple(kept), len(masks) - sum(location.steps for location in kept)


def _location(run: Sequence[Key], mask: LocationMask) -> Location:
    step, phase = run[0]
    return Location(
        step,
        PHASES[phase],
        ranks=tuple(rank for rank in range(mask.ranks.bit_length()) if mask.ranks >> rank & 1),
        differing=mask.differing.bit_count(),
        total=mask.names.bit_count(),
        last_step=run[-1][0] if len(run) > 1 else None,
        steps=len(run),
    )


class RankGroups:
    """The ranks with equal contents in one step and phase. Ranks are added in ascending order, unless like rank 0."""

    def __init__(self, world_size: int, digest: int | None) -> None:
        self._digests = array("q", [_bits(digest)]) * world_size
        self._contents = array("q", [_LIKE_RANK_0]) * world_size

    def add_known(self, rank: int, digest: int | None) -> bool:
        """Add a rank to an earlier rank with the same digest; False without such a rank."""
        self._digests[rank] = _bits(digest)
        earlier = self._digests.index(_bits(digest))
        self._contents[rank] = self._contents[earlier]
        return earlier < rank

    def add(self, rank: int, differing: Mapping[str, object]) -> None:
        """Add a rank by its difference to rank 0: names may come in another order, which changes a digest."""
        self._contents[rank] = _content_digest(differing) if differing else _LIKE_RANK_0

    def outside_majority(self) -> tuple[int, ...]:
        """Ranks outside the strict majority; all ranks without a majority."""
        return _outside_majority([ranks for _, ranks in group_ranks(self._contents)])


def _content_digest(contents: Mapping[str, object]) -> int:
    content = repr(sorted(contents.items())).encode()
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little", signed=True) or 1


def _bits(digest: int | None) -> int:
    """Zero for a missing section."""
    return 0 if digest is None else digest or 1


def read_divergences(run: Run, key: Key, keep: Keep) -> list[Divergence]:
    """The divergences between ranks in a location, in the order of names. One file is open at a time."""
    step, phase = key[0], PHASES[key[1]]
    groups: dict[str, dict[tuple[str, str], _Group]] = {}
    for rank in range(run.world_size):
        with run.open(rank, until=step) as trace:
            for name, entry in entries(trace.section(step, phase), keep).items():
                if entry.identity:
                    groups.setdefault(name, {}).setdefault(entry.identity, (entry, []))[1].append(rank)
    by_name = {name: _with_absent(list(found.values()), run.world_size) for name, found in groups.items()}
    return [_divergence(step, phase, name, found) for name, found in by_name.items() if len(found) > 1]


def _with_absent(groups: list[_Group], world_size: int) -> list[_Group]:
    """The groups with a group of the remaining ranks, greatest group first."""
    having = {rank for _, ranks in groups for rank in ranks}
    if without := [rank for rank in range(world_size) if rank not in having]:
        groups.append((ABSENT, without))
    return sorted(groups, key=lambda group: (-len(group[1]), group[1]))


def _divergence(step: int, phase: str, name: str, groups: list[_Group]) -> Divergence:
    return Divergence(
        step=step,
        phase=phase,
        name=name,
        kind=" or ".join(dict.fromkeys(entry.kind for entry, _ in groups if entry.value is not None)),
        ranks=_outside_majority([ranks for _, ranks in groups]),
        sides=tuple(entry.side(name_ranks(ranks)) for entry, ranks in groups),
    )


def _outside_majority(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Ranks outside the strict majority; all ranks without a majority. ``groups`` begin with the greatest."""
    return outside_majority(groups) or tuple(sorted(chain.from_iterable(groups)))
