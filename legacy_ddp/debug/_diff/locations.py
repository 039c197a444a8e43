"""Steps and phases with differences: names and ranks of all, and the divergences in one of them."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from legacy_ddp._compare import name_ranks, outside_majority
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

_Group = tuple[Entry, list[int]]
"""An entry, and the ranks which hold it."""


class Differing(NamedTuple):
    """Ranks with a difference, ascending, the differing names and all names of one step and phase."""

    ranks: tuple[int, ...] = ()
    differing: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()


class Locations:
    """All steps and phases with differences."""

    def __init__(self) -> None:
        self.found: dict[Key, Differing] = {}
        self._kept: dict[frozenset[str], frozenset[str]] = {}

    def add(self, key: Key, rank: int, differing: Iterable[str], names: Iterable[str]) -> None:
        """Add the differing names, among ``names``, of the next rank."""
        before = self.found.get(key, Differing())
        self.found[key] = Differing(
            (*before.ranks, rank), self._joined(before.differing, differing), self._joined(before.names, names)
        )

    def _joined(self, before: frozenset[str], more: Iterable[str]) -> frozenset[str]:
        """The union; equal sets are kept once, because most steps differ in the same names."""
        found = before.union(more)
        return self._kept.setdefault(found, found)


def first_of_tensors(found: Mapping[Key, Differing]) -> Key | None:
    """The first location with differing tensors."""
    return min((key for key in found if key[1] != SETTINGS), default=None)


def merge(found: Mapping[Key, Differing], steps: Sequence[int]) -> tuple[tuple[Location, ...], int]:
    """The first few locations, and the number of steps and phases with differences beyond them.

    Steps are merged into one location if they are consecutive in ``steps`` and differ alike in a phase.
    """
    next_step = dict(pairwise(steps))
    runs: dict[Key, list[Key]] = {}
    latest: dict[int, list[Key]] = {}  # by phase
    for key in sorted(found):
        run = latest.get(key[1])
        if run is None or next_step.get(run[-1][0]) != key[0] or found[run[-1]] != found[key]:
            run = runs[key] = latest[key[1]] = []
        run.append(key)
    kept = [_location(run, found[first]) for first, run in list(runs.items())[:MAX_LOCATIONS]]
    return tuple(kept), len(found) - sum(location.steps for location in kept)


def _location(run: Sequence[Key], found: Differing) -> Location:
    step, phase = run[0]
    return Location(
        step,
        PHASES[phase],
        ranks=found.ranks,
        differing=len(found.differing),
        total=len(found.names),
        last_step=run[-1][0] if len(run) > 1 else None,
        steps=len(run),
    )


class RankGroups:
    """The ranks with equal contents in one step and phase. A rank that was not added is like rank 0."""

    def __init__(self) -> None:
        self._groups: dict[int, list[int]] = {}  # by the difference to rank 0
        self._known: dict[int | None, list[int]] = {}  # by digest

    def add_known(self, rank: int, digest: int | None) -> bool:
        """Add a rank to an earlier rank with the same digest; False without such a rank."""
        group = self._known.get(digest)
        if group is not None:
            group.append(rank)
        return group is not None

    def add(self, rank: int, digest: int | None, differing: Mapping[str, object]) -> None:
        """Add a rank by its difference to rank 0: names may come in another order, which changes a digest."""
        group = self._groups.setdefault(hash(frozenset(differing.items())), []) if differing else []
        self._known[digest] = group
        group.append(rank)

    def outside_majority(self, world_size: int) -> tuple[int, ...]:
        """Ranks outside the strict majority; all ranks without a majority."""
        like_first = sorted({*range(world_size)}.difference(*self._groups.values()))
        return _outside_majority(sorted([like_first, *self._groups.values()], key=lambda of: (-len(of), of)))


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
