"""Steps and phases with differences: names and ranks of all, and the divergences in one of them."""

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, pairwise

from legacy_ddp._text import group_ranks, name_ranks, outside_majority
from legacy_ddp.debug._diff.pair import (
    ABSENT,
    Entry,
    EntryDifference,
    EntryPair,
    Keep,
    entries,
    entry_differences,
    greatest_difference,
    total_norm,
)
from legacy_ddp.debug._diff.result import Divergence, Location
from legacy_ddp.debug._trace.records import PHASES
from legacy_ddp.debug._trace.run import Run

MAX_LOCATIONS = 10
MAX_OTHERS = 10

Key = tuple[int, int]
"""Step, and index of the phase in ``PHASES``: sorts in the order of training."""

SETTINGS = PHASES.index("settings")

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

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.ranks.bit_length()) if self.ranks >> rank & 1)


def bit_mask(indices: Collection[int], size: int) -> int:
    """The number with these bits set, all below ``size``."""
    digits = bytearray(b"0" * size)
    for index in indices:
        digits[-1 - index] = ord("1")
    return int(digits or b"0", 2)


class Locations:
    """All steps and phases with differences."""

    def __init__(self) -> None:
        self.masks: dict[Key, LocationMask] = {}
        self._indices: dict[int, dict[str, int]] = {}  # bits of names by phase, in the order of arrival
        self._of_all_names: dict[tuple[int, tuple[str, ...]], int] = {}  # these names repeat in every step

    def add(self, key: Key, rank: int, differing: Collection[str], names: tuple[str, ...]) -> None:
        """Add the differing names, among ``names``, of one rank."""
        if (key[1], names) not in self._of_all_names:
            self._of_all_names[key[1], names] = self._mask(key[1], names)
        before = self.masks.get(key, LocationMask())
        self.masks[key] = LocationMask(
            before.ranks | 1 << rank,
            before.differing | self._mask(key[1], differing),
            before.names | self._of_all_names[key[1], names],
        )

    def _mask(self, phase: int, names: Collection[str]) -> int:
        known = self._indices.setdefault(phase, {})
        indices = [known.setdefault(name, len(known)) for name in names]
        return bit_mask(indices, len(known))


def first_of_tensors(masks: Mapping[Key, LocationMask]) -> Key | None:
    """The first location with differing tensors."""
    return min((key for key in masks if key[1] != SETTINGS), default=None)


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
        ranks=mask.rank_numbers,
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


def divergences_of_runs(
    step: int, phase: str, ranks: Sequence[int], pairs: Iterable[EntryPair]
) -> tuple[list[Divergence], float | None]:
    """The divergences between A and B in a location on the lowest of ``ranks``, each with all ranks where it differs.

    ``pairs``: the entries of A and B on each of ``ranks``. Also returns the greatest relative difference of norms.
    """
    found: list[EntryDifference] = []
    size: float | None = None
    ranks_of: dict[str, list[int]] = {}
    for rank, (a, b) in zip(ranks, pairs, strict=True):
        differences = entry_differences(a, b)
        if rank == ranks[0]:
            total = total_norm(entry.norm for entry in a.values()) if phase.endswith("gradients") else 0.0
            found, size = differences, greatest_difference(differences, total)
        for item in differences:
            ranks_of.setdefault(item.name, []).append(rank)
    return [
        Divergence(step, phase, item.name, item.kind, tuple(ranks_of[item.name]), (item.a.side("A"), item.b.side("B")))
        for item in found
    ], size


def divergences_of_ranks(run: Run, key: Key, keep: Keep) -> list[Divergence]:
    """The divergences between ranks in a location, in the order of names. One file is open at a time."""
    step, phase = key[0], PHASES[key[1]]
    everyone = []
    groups: dict[str, dict[tuple[str, str], _Group]] = {}
    for rank in range(run.world_size):
        with run.open(rank, until=step) as trace:
            section = trace.section(step, phase)
            if section is None and phase == "settings":  # a step without settings is one that was not taken
                continue
            everyone.append(rank)
            for name, entry in entries(section, keep).items():
                if entry.identity:
                    groups.setdefault(name, {}).setdefault(entry.identity, (entry, []))[1].append(rank)
    by_name = {name: _with_absent(list(found.values()), everyone) for name, found in groups.items()}
    return [
        Divergence(
            step=step,
            phase=phase,
            name=name,
            kind=" or ".join(dict.fromkeys(entry.kind for entry, _ in found if entry.value is not None)),
            ranks=_outside_majority([ranks for _, ranks in found]),
            sides=tuple(entry.side(name_ranks(ranks)) for entry, ranks in found),
        )
        for name, found in by_name.items()
        if len(found) > 1
    ]


def _with_absent(groups: list[_Group], everyone: Iterable[int]) -> list[_Group]:
    """The groups with a group of the remaining ranks, greatest group first."""
    if without := sorted({*everyone}.difference(*(ranks for _, ranks in groups))):
        groups = [*groups, (ABSENT, without)]
    return sorted(groups, key=lambda group: (-len(group[1]), group[1]))


def _outside_majority(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Ranks outside the strict majority; all ranks without a majority. ``groups`` begin with the greatest."""
    return outside_majority(groups) or tuple(sorted(chain.from_iterable(groups)))
