"""What the ranks of one run hold in the first place where they differ, and how much differs in all of them."""

from collections.abc import Mapping, Sequence

from legacy_ddp._compare import Difference, name_ranks
from legacy_ddp.debug._diff.locations import Key, Mark, NameBits, bits_of
from legacy_ddp.debug._diff.pair import Pair
from legacy_ddp.debug._diff.result import Divergence
from legacy_ddp.debug._diff.sections import NOTHING, SHARED, Entry, Keep, entries
from legacy_ddp.debug._trace.line_format import PHASES
from legacy_ddp.debug._trace.run import Run

Value = tuple[str, str]


class FirstPlace:
    """Which ranks hold what, of every name of one place."""

    def __init__(self, key: Key) -> None:
        self._step, self._phase = key
        self._holders: dict[str, dict[Value, tuple[Entry, list[int]]]] = {}
        self._size = 0

    def take(self, rank: int, held: dict[str, Entry]) -> None:
        """Ranks come in ascending order, and all of them do."""
        self._size = rank + 1
        for name, entry in held.items():
            if entry.value:
                self._holders.setdefault(name, {}).setdefault(entry.value, (entry, []))[1].append(rank)

    def divergences(self) -> list[Divergence]:
        """Every name that not all ranks hold alike, in the order of names."""
        return [self._divergence(name) for name in self._holders if len(self._groups(name)) > 1]

    def _groups(self, name: str) -> list[tuple[Entry, list[int]]]:
        groups = list(self._holders[name].values())
        having = {rank for _, ranks in groups for rank in ranks}
        if without := [rank for rank in range(self._size) if rank not in having]:
            groups.append((NOTHING, without))
        return sorted(groups, key=lambda group: (-len(group[1]), group[1]))

    def _divergence(self, name: str) -> Divergence:
        groups = self._groups(name)
        return Divergence(
            step=self._step,
            phase=PHASES[self._phase],
            name=name,
            kind=" or ".join(dict.fromkeys(entry.kind for entry, _ in groups if entry.word is not None)),
            ranks=outside([ranks for _, ranks in groups]),
            sides=tuple(entry.side(name_ranks(ranks)) for entry, ranks in groups),
        )


def read_first(run: Run, key: Key, keep: Keep) -> FirstPlace:
    """What all ranks hold in the first place that differs. One file is open at a time."""
    first = FirstPlace(key)
    for rank in range(run.world_size):
        with run.open(rank, until=key[0]) as trace:
            first.take(rank, entries(trace.section(key[0], PHASES[key[1]]), keep))
    return first


def mark_places(run: Run, holders: Mapping[Key, Sequence[Sequence[int]]], keep: Keep) -> dict[Key, Mark]:
    """How much differs in each of some places, and on which ranks. Two files are open at a time.

    ``holders``: of each place the groups of ranks that hold the same. Of each group one rank is compared with rank 0.
    """
    wanted: dict[int, list[Key]] = {}
    marks: dict[Key, Mark] = {}
    for key, groups in holders.items():
        ranks = outside(sorted((list(group) for group in groups), key=lambda group: (-len(group), group)))
        marks[key] = Mark(bits_of(ranks, run.world_size))
        for rank in (group[0] for group in groups if group[0]):
            wanted.setdefault(rank, []).append(key)
    names = NameBits()
    with run.open(0, until=max(holders)[0]) as reference:
        for rank, keys in sorted(wanted.items()):
            with run.open(rank, until=keys[-1][0]) as trace:
                pair = Pair(reference, trace, SHARED, keep)
                for step, phase in keys:
                    differing, held = pair.differing(step, PHASES[phase])
                    bits = names.of(phase, differing), names.of_all(phase, held)
                    marks[step, phase] = marks[step, phase].with_more(0, *bits)
    return marks


def outside(groups: list[list[int]]) -> tuple[int, ...]:
    """The ranks outside the strict majority; all where there is none. The greatest group comes first."""
    difference = Difference("", tuple((str(index), tuple(ranks)) for index, ranks in enumerate(groups)))
    return difference.suspects or tuple(sorted(rank for ranks in groups for rank in ranks))
