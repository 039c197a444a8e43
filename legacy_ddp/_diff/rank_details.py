"""What do the ranks of one run hold in the first few places where they differ? One file is open at a time."""

from legacy_ddp._compare import Difference, name_ranks
from legacy_ddp._diff.finding import Divergence
from legacy_ddp._diff.places import Key
from legacy_ddp._diff.sections import NOTHING, Entry, Keep, entries
from legacy_ddp._trace.lines import PHASES
from legacy_ddp._trace.run import Run

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


class LaterPlace:
    """How many names of one place not all ranks hold alike."""

    def __init__(self) -> None:
        self._reference: dict[str, Value | None] = {}
        self._names: set[str] = set()
        self.differing: set[str] = set()

    @property
    def total(self) -> int:
        return len(self._names)

    def take(self, rank: int, held: dict[str, Entry]) -> None:
        """Ranks come in ascending order."""
        self._names |= held.keys()
        if rank == 0:
            self._reference = {name: entry.value for name, entry in held.items()}
            return
        for name in held.keys() | self._reference.keys():
            if held.get(name, NOTHING).value != self._reference.get(name):
                self.differing.add(name)


def read_places(run: Run, keys: list[Key], keep: Keep) -> tuple[FirstPlace, dict[Key, LaterPlace]]:
    """What all ranks hold in the first of some places, and how much differs in each."""
    first, places = FirstPlace(keys[0]), {key: LaterPlace() for key in keys}
    for rank in range(run.world_size):
        with run.open(rank, until=keys[-1][0]) as trace:
            for (step, phase), place in places.items():
                held = entries(trace.section(step, PHASES[phase]), keep)
                place.take(rank, held)
                if (step, phase) == keys[0]:
                    first.take(rank, held)
    return first, places


def outside(groups: list[list[int]]) -> tuple[int, ...]:
    """The ranks outside the strict majority; all where there is none. The greatest group comes first."""
    difference = Difference("", tuple((str(index), tuple(ranks)) for index, ranks in enumerate(groups)))
    return difference.suspects or tuple(sorted(rank for ranks in groups for rank in ranks))
