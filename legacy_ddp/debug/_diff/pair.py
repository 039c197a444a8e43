"""Comparison of two trace files: the entries that differ, and the steps and phases in which they differ."""

import ast
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain, pairwise
from math import hypot
from pathlib import Path
from typing import NamedTuple

from legacy_ddp._errors import TraceError
from legacy_ddp._text import list_some, name_ranks, outside_majority
from legacy_ddp.debug._diff.result import Divergence, Location, Side, relative_difference
from legacy_ddp.debug._trace.read import RankTrace, Run
from legacy_ddp.debug._trace.records import PHASES, Section

GROWTH_LIMIT = 1e-3
FP32_DIGIT = 2.0**-23
# Phases in which all ranks of a run are expected to hold equal values.
SHARED_PHASES = tuple(phase for phase in PHASES if phase != "local_gradients")
# Absent at the start of a run: no call was made yet.
_PHASES_OF_A_CALL = ("local_gradients", "reduced_gradients")
_FOLLOWED_PHASES = ("reduced_gradients", "parameters")
# torch.compile(module) wraps the module and puts this before the names of parameters; module.compile() does not.
_COMPILED = "_orig_mod."

Keep = Callable[[str, str], bool]
"""Whether the entry with this phase and name is compared."""


@dataclass(frozen=True)
class Entry:
    """The value of one name in a section. ``value`` None: the entry is absent, whatever its kind."""

    kind: str
    value: str | None
    norm: float | None
    nonfinite: int

    @property
    def identity(self) -> tuple[str, str] | None:
        """Kind and value: entries are equal if these are. None for an absent entry. A setting 0 is equal to 0.0."""
        if self.value is None:
            return None
        return self.kind, self.value if self.kind else _as_number(self.value)

    def side(self, label: str) -> Side:
        return Side(label, self.value, self.norm, self.nonfinite)


def _as_number(text: str) -> str:
    try:
        return repr(float(text))
    except ValueError:
        return text


ABSENT = Entry("", None, None, 0)
EntryPair = tuple[dict[str, Entry], dict[str, Entry]]
"""The entries of A and of B, by name."""


@dataclass(frozen=True)
class EntryDifference:
    name: str
    a: Entry
    b: Entry

    @property
    def kind(self) -> str:
        """Dtype and shape; those of A and of B if they differ."""
        kinds = {entry.kind for entry in (self.a, self.b) if entry.value is not None}
        return f"{self.a.kind} in A, {self.b.kind} in B" if len(kinds) > 1 else kinds.pop()

    @property
    def relative(self) -> float | None:
        """Relative difference of the norms; None if a norm is missing or leaves out non-finite elements."""
        if self.a.norm is None or self.b.norm is None or self.a.nonfinite or self.b.nonfinite:
            return None
        return relative_difference(self.a.norm, self.b.norm)


def greatest_difference(differences: Sequence[EntryDifference], total: float = 0.0) -> float | None:
    """The greatest relative difference of norms; None if any is unknown. ``total``: norm of all gradients together."""
    shares = [share for item in differences if (share := item.relative) is not None]
    if len(shares) < len(differences) or not shares:
        return None
    return max(_share_of_total(item, share, total) for item, share in zip(differences, shares, strict=True))


def _share_of_total(item: EntryDifference, share: float, total: float) -> float:
    # The gradient of a bias before BatchNorm is zero except for rounding, and its relative difference is arbitrary: a
    # difference below the last fp32 digit of the total is taken relative to the total.
    distance = abs((item.a.norm or 0.0) - (item.b.norm or 0.0))
    return min(share, distance / total) if distance < FP32_DIGIT * total else share


def total_norm(norms: Iterable[float | None]) -> float:
    return hypot(*(norm for norm in norms if norm is not None))


def entries(section: Section | None, keep: Keep) -> dict[str, Entry]:
    if section is None:
        return {}
    names, values = section.names, section.values
    rows = zip(names.names, names.kinds, values.words, values.norms, strict=True)
    return {
        name: Entry(kind, value, norm, values.nonfinite.get(index, 0))
        for index, (name, kind, value, norm) in enumerate(rows)
        if keep(names.phase, name)
    }


def entry_differences(a: dict[str, Entry], b: dict[str, Entry]) -> list[EntryDifference]:
    """The unequal entries, in the order of names in A; then those that only B has."""
    found = (EntryDifference(name, a.get(name, ABSENT), b.get(name, ABSENT)) for name in dict.fromkeys([*a, *b]))
    return [item for item in found if item.a.identity != item.b.identity]


def keep_all(_phase: str, _name: str) -> bool:
    return True


def keep_shared(patterns: Sequence[str]) -> Keep:
    """Keep all entries except buffers with a name matching ``patterns``, because their values belong to one rank."""

    def keep(phase: str, name: str) -> bool:
        return phase != "buffers" or not any(fnmatchcase(_buffer_name(name), pattern) for pattern in patterns)

    return keep if patterns else keep_all


def _buffer_name(name: str) -> str:
    """``bn.running_mean`` from ``buffer 'bn.running_mean'``."""
    quoted = name.removeprefix("buffer ")
    try:
        return str(ast.literal_eval(quoted))
    except (ValueError, SyntaxError):
        return quoted


def unfinished_step(trace: RankTrace) -> int | None:
    """The last step, which may lack phases: a run may end before its optimizer has stepped."""
    return trace.steps[-1] if trace.steps else None


@dataclass(frozen=True)
class Pair:
    """Two trace files. ``phases``: the phases to compare. ``keep``: selects the entries to compare.

    ``may_lack``: phases that one file may lack in a step without a difference, besides settings. A recorder leaves
    buffers out where it cannot see their changes.
    """

    a: RankTrace
    b: RankTrace
    phases: Sequence[str] = PHASES
    keep: Keep = keep_all
    may_lack: Collection[str] = ("buffers",)

    @cached_property
    def steps(self) -> list[int]:
        """Steps recorded in both files, ascending."""
        return sorted(set(self.a.steps) & set(self.b.steps))

    @property
    def starts(self) -> set[int]:
        return {trace.environment.start for trace in (self.a, self.b)}

    @cached_property
    def compared(self) -> list[tuple[int, str]]:
        """The compared steps and phases, in the order of training.

        A phase is compared if both files hold it in any step. If one file lacks it in a step, the step differs, but not
        if this is the last step of that file, or if a file may lack the phase.
        """
        both = [phase for phase in self.phases if phase in self.a.phases and phase in self.b.phases]
        starts = self.starts
        return [
            (step, phase)
            for step in self.steps
            for phase in both
            if not (step in starts and phase in _PHASES_OF_A_CALL) and self._is_compared(step, phase)
        ]

    def _is_compared(self, step: int, phase: str) -> bool:
        missing = [trace for trace in (self.a, self.b) if trace.digest(step, phase) is None]
        # A step without settings is one that the optimizer did not take.
        may_lack = phase in ("settings", *self.may_lack)
        return not missing or (len(missing) == 1 and not may_lack and unfinished_step(missing[0]) != step)

    @cached_property
    def candidates(self) -> list[tuple[int, str]]:
        """Steps and phases with unequal digests, in the order of training.

        The compared entries may be equal nevertheless: if names come in another order, or if only entries differ that
        are not compared.
        """
        return [key for key in self.compared if self.a.digest(*key) != self.b.digest(*key)]

    def differing(self, step: int, phase: str) -> tuple[dict[str, tuple[str, str] | None], tuple[str, ...]]:
        """The names of unequal entries with their :attr:`Entry.identity` in B, and all names."""
        a, b = self.entries(step, phase)
        return {item.name: item.b.identity for item in entry_differences(a, b)}, tuple(dict.fromkeys([*a, *b]))

    def entries(self, step: int, phase: str) -> EntryPair:
        return entries(self.a.section(step, phase), self.keep), entries(self.b.section(step, phase), self.keep)

    def entry_counts(self) -> dict[tuple[int, str], int]:
        """Number of compared entries, by step and phase; without zeros."""
        return {key: count for key in self.compared if (count := self._entry_count(*key))}

    def _entry_count(self, step: int, phase: str) -> int:
        names = self.a.names(step, phase) or self.b.names(step, phase)
        if names is None or self.keep is keep_all or phase != "buffers":
            return len(names.names) if names else 0
        return sum(self.keep(phase, name) for name in names.names)


@dataclass(frozen=True)
class Growth:
    """The first name with norms more than ``GROWTH_LIMIT`` apart, or empty. ``last``: the last step compared."""

    last: int
    step: int = 0
    name: str = ""


def find_growth(pair: Pair, first: int) -> Growth:
    """Compare norms from step ``first`` on, until a difference has grown. Reads two phases per step."""
    steps = [step for step in pair.steps if step >= first]
    for step, phase in pair.compared:
        if step >= first and phase in _FOLLOWED_PHASES and (name := _grown_name(pair, step, phase)):
            return Growth(steps[-1], step, name)
    return Growth(steps[-1] if steps else first)


def _grown_name(pair: Pair, step: int, phase: str) -> str:
    if pair.a.digest(step, phase) == pair.b.digest(step, phase):
        return ""
    a, b = pair.a.section(step, phase), pair.b.section(step, phase)
    if a is None or b is None:
        return ""
    # Dictionaries only where names differ: a section may hold thousands of norms.
    norms_b = b.values.norms if a.names == b.names else [*map(b.norms.get, a.names.names)]
    rounding = FP32_DIGIT * total_norm(a.values.norms) if phase.endswith("gradients") else 0.0
    for name, left, right in zip(a.names.names, a.values.norms, norms_b, strict=True):
        if left is None or right is None:
            continue
        distance = abs(left - right)
        if distance > GROWTH_LIMIT * max(left, right) and distance >= rounding:
            return name
    return ""


def check_same_model(pair: Pair, a: Path, b: Path) -> None:
    """Raises a TraceError if parameters of A and B have other names, dtypes or shapes. ``a``, ``b``: for the error."""
    left, right = _kinds(pair, pair.a), _kinds(pair, pair.b)
    reshaped = [name for name, kind in left.items() if kind and kind != (right.get(name) or kind)]
    found = {
        "only in A": [name for name in left if name not in right],
        "only in B": [name for name in right if name not in left],
        "of another kind": [f"{name} ({left[name]} in A, {right[name]} in B)" for name in reshaped],
    }
    if got := "; ".join(f"{title}: {list_some(names)}" for title, names in found.items() if names):
        plain = [{name.replace(_COMPILED, ""): kind for name, kind in kinds.items()} for kinds in (left, right)]
        advice = "compare runs of one model"
        if plain[0] == plain[1]:
            advice = (
                f"the names differ only by {_COMPILED!r} of torch.compile(module); use module.compile(), which keeps "
                "names"
            )
        raise TraceError(f"A ({a}) and B ({b}) hold other parameters: got {got}; expected the same in both; {advice}")


def _kinds(pair: Pair, trace: RankTrace) -> dict[str, str]:
    """Kinds of parameters by name in the first common step with parameters; without such a step names only."""
    for step in pair.steps:
        if pair.a.names(step, "parameters") and pair.b.names(step, "parameters"):
            names = trace.names(step, "parameters")
            return dict(zip(names.names, names.kinds, strict=True)) if names else {}
    return {f"parameter {name!r}": "" for name in trace.environment.parameters}


MAX_LOCATIONS = 10
MAX_OTHERS = 10

Key = tuple[int, int]
"""Step, and index of the phase in ``PHASES``: sorts in the order of training."""

SETTINGS = PHASES.index("settings")

_Group = tuple[Entry, list[int]]
"""An entry, and the ranks that hold it."""


class Differing(NamedTuple):
    """Of one step and phase: the ranks with a difference, ascending; the differing names; all names."""

    ranks: tuple[int, ...] = ()
    differing: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()


class Locations:
    def __init__(self) -> None:
        self.found: dict[Key, Differing] = {}
        self._kept: dict[frozenset[str], frozenset[str]] = {}

    def add(self, key: Key, rank: int, differing: Iterable[str], names: Iterable[str]) -> None:
        """Add a rank. Ranks come in ascending order. ``names``: all names, the differing ones among them."""
        before = self.found.get(key, Differing())
        self.found[key] = Differing(
            (*before.ranks, rank), self._joined(before.differing, differing), self._joined(before.names, names)
        )

    def _joined(self, before: frozenset[str], more: Iterable[str]) -> frozenset[str]:
        found = before.union(more)
        return self._kept.setdefault(found, found)  # saves memory: most steps differ in the same names


def first_of_tensors(found: Mapping[Key, Differing]) -> Key | None:
    return min((key for key in found if key[1] != SETTINGS), default=None)


def merge(found: Mapping[Key, Differing], steps: Sequence[int]) -> tuple[tuple[Location, ...], int]:
    """The first few locations, and the number of steps and phases with differences beyond them.

    Steps are merged into one location if they are consecutive in ``steps`` and have the same difference in a phase.
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
        """Add a rank to the group of an earlier rank with the same digest; False without such a rank."""
        group = self._known.get(digest)
        if group is not None:
            group.append(rank)
        return group is not None

    def add(self, rank: int, digest: int | None, differing: Mapping[str, object]) -> None:
        """Add a rank by its difference to rank 0: equal entries in another order have another digest."""
        group = self._groups.setdefault(hash(frozenset(differing.items())), []) if differing else []
        self._known[digest] = group
        group.append(rank)

    def outside_majority(self, world_size: int) -> tuple[int, ...]:
        like_first = sorted({*range(world_size)}.difference(*self._groups.values()))
        return _outside_majority(sorted([like_first, *self._groups.values()], key=lambda of: (-len(of), of)))


def divergences_of_runs(
    step: int, phase: str, ranks: Sequence[int], pairs: Iterable[EntryPair]
) -> tuple[list[Divergence], float | None]:
    """The divergences on the lowest of ``ranks``, each with all ranks where it differs, and their
    :func:`greatest_difference`.

    ``pairs``: the entries of A and B on each of ``ranks``.
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
            if section is None and phase == "settings":  # the rank's optimizer did not take this step
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
    """The groups and a group of the ranks without the entry, the greatest group first."""
    if without := sorted({*everyone}.difference(*(ranks for _, ranks in groups))):
        groups = [*groups, (ABSENT, without)]
    return sorted(groups, key=lambda group: (-len(group[1]), group[1]))


def _outside_majority(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Ranks outside the strict majority; all ranks without a majority. ``groups`` begin with the greatest."""
    return outside_majority(groups) or tuple(sorted(chain.from_iterable(groups)))
