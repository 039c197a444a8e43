"""Values of all ranks in the first location with a difference, and differing names and ranks of all locations."""

from collections.abc import Mapping, Sequence

from legacy_ddp._compare import Difference, name_ranks
from legacy_ddp.debug._diff.locations import Key, LocationMask, NameMasks, bit_mask
from legacy_ddp.debug._diff.pair import Pair
from legacy_ddp.debug._diff.result import Divergence
from legacy_ddp.debug._diff.sections import ABSENT, SHARED_PHASES, Entry, Keep, entries
from legacy_ddp.debug._trace.records import PHASES
from legacy_ddp.debug._trace.run import Run

Group = tuple[Entry, list[int]]
"""An entry, and the ranks which hold it."""


def read_divergences(run: Run, key: Key, keep: Keep) -> list[Divergence]:
    """The divergences in a location, in the order of names. One file is open at a time."""
    step, phase = key[0], PHASES[key[1]]
    groups: dict[str, dict[tuple[str, str], Group]] = {}
    for rank in range(run.world_size):
        with run.open(rank, until=step) as trace:
            for name, entry in entries(trace.section(step, phase), keep).items():
                if entry.identity:
                    groups.setdefault(name, {}).setdefault(entry.identity, (entry, []))[1].append(rank)
    by_name = {name: _with_absent(list(found.values()), run.world_size) for name, found in groups.items()}
    return [_divergence(step, phase, name, found) for name, found in by_name.items() if len(found) > 1]


def _with_absent(groups: list[Group], world_size: int) -> list[Group]:
    """The groups with a group of the remaining ranks, greatest group first."""
    having = {rank for _, ranks in groups for rank in ranks}
    if without := [rank for rank in range(world_size) if rank not in having]:
        groups.append((ABSENT, without))
    return sorted(groups, key=lambda group: _greatest_first(group[1]))


def _divergence(step: int, phase: str, name: str, groups: list[Group]) -> Divergence:
    return Divergence(
        step=step,
        phase=phase,
        name=name,
        kind=" or ".join(dict.fromkeys(entry.kind for entry, _ in groups if entry.value is not None)),
        ranks=_outside_majority([ranks for _, ranks in groups]),
        sides=tuple(entry.side(name_ranks(ranks)) for entry, ranks in groups),
    )


def read_masks(run: Run, groups: Mapping[Key, Sequence[Sequence[int]]], keep: Keep) -> dict[Key, LocationMask]:
    """Ranks and names with a difference, for every location. Two files are open at a time.

    ``groups``: for every location, the groups of ranks with equal digests. One rank of each group is compared with
    rank 0.
    """
    wanted: dict[int, list[Key]] = {}
    masks: dict[Key, LocationMask] = {}
    for key, found in groups.items():
        ranks = _outside_majority(sorted(map(list, found), key=_greatest_first))
        masks[key] = LocationMask(bit_mask(ranks, run.world_size))
        for rank in (group[0] for group in found if group[0]):
            wanted.setdefault(rank, []).append(key)
    names = NameMasks()
    with run.open(0, until=max(groups)[0]) as reference:
        for rank, keys in sorted(wanted.items()):
            with run.open(rank, until=keys[-1][0]) as trace:
                pair = Pair(reference, trace, SHARED_PHASES, keep)
                for step, phase in keys:
                    differing, compared = pair.differing_names(step, PHASES[phase])
                    name_masks = names.mask(phase, differing), names.cached_mask(phase, compared)
                    masks[step, phase] = masks[step, phase].union(0, *name_masks)
    return masks


def _greatest_first(ranks: list[int]) -> tuple[int, list[int]]:
    return -len(ranks), ranks


def _outside_majority(groups: list[list[int]]) -> tuple[int, ...]:
    """Ranks outside the strict majority; all ranks without a majority. ``groups`` begin with the greatest."""
    difference = Difference("", tuple((str(index), tuple(ranks)) for index, ranks in enumerate(groups)))
    return difference.suspects or tuple(sorted(rank for ranks in groups for rank in ranks))
