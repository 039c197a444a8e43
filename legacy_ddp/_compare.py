"""Comparison of one row per rank, for headers, layouts and replicas. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from legacy_ddp._text import first_few

MISSING = "nothing"
MAX_LINES = 10
MAX_SIDES = 4

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Difference:
    """An item that differs between ranks. ``holders``: each value and its ranks, most ranks first."""

    name: str
    holders: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks outside the strict majority; empty without a majority, because then no rank can be blamed."""
        return outside_majority([ranks for _, ranks in self.holders])

    @property
    def sides(self) -> str:
        """The groups of ranks with equal values, the smallest first, as in ``rank 1 against ranks 0, 2``."""
        groups = [name_ranks(ranks) for _, ranks in reversed(self.holders)]
        if len(groups) > 2 and all(len(ranks) == 1 for _, ranks in self.holders):
            return "every rank has its own"
        return " against ".join(first_few(groups, MAX_SIDES, "{} more groups"))

    def __str__(self) -> str:
        # The smallest group first: the reader looks for it.
        parts = [f"{name_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} {value}" for value, ranks in self.holders]
        return f"{self.name}: {'; '.join(reversed(parts))}"


@dataclass(frozen=True)
class Finding:
    """All differences between the rows; false without a difference."""

    differences: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return bool(self.differences)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks outside the majority in any of the differences."""
        return tuple(sorted({rank for difference in self.differences for rank in difference.suspects}))

    def __str__(self) -> str:
        return "\n".join(f"  {line}" for line in first_few(self.differences, MAX_LINES))


def compare_rows(rows: Sequence[Mapping[str, str]], ranks: Sequence[int] | None = None) -> Finding:
    """Compare the rows item by item. An item that is missing in a row has the value ``nothing`` there.

    ``rows[i]``: item -> value, of rank i, or of ``ranks[i]`` if given. Differences keep the order in which the items
    first appear.
    """
    if rows and rows.count(rows[0]) == len(rows):  # as in a call without a mismatch: no more time for it
        return Finding(())
    of_ranks = range(len(rows)) if ranks is None else ranks
    return compare_groups([(row, (rank,)) for row, rank in zip(rows, of_ranks, strict=True)])


def compare_groups(groups: Sequence[tuple[Mapping[str, str], Sequence[int]]]) -> Finding:
    """Compare rows item by item, as :func:`compare_rows`. ``groups``: each row with the ranks that have the row.

    Items are compared once for each row, whatever the number of its ranks.
    """
    differences = []
    for name in dict.fromkeys(name for row, _ in groups for name in row):
        values = [row.get(name, MISSING) for row, _ in groups]
        if values.count(values[0]) < len(values):
            differences.append(Difference(name, _merge(zip(values, (ranks for _, ranks in groups), strict=True))))
    return Finding(tuple(differences))


def group_ranks(
    values: Sequence[_Value], ranks: Sequence[int] | None = None
) -> tuple[tuple[_Value, tuple[int, ...]], ...]:
    """Each value with its ranks, most ranks first; of equal numbers the lowest rank first.

    ``values[i]``: of rank i, or of ``ranks[i]`` if given.
    """
    of_ranks = range(len(values)) if ranks is None else ranks
    return _merge((value, (rank,)) for value, rank in zip(values, of_ranks, strict=True))


def _merge(groups: Iterable[tuple[_Value, Sequence[int]]]) -> tuple[tuple[_Value, tuple[int, ...]], ...]:
    """Each value with the ranks of all its groups, in the order of :func:`group_ranks`."""
    holders: dict[_Value, list[int]] = {}
    for value, ranks in groups:
        holders.setdefault(value, []).extend(ranks)
    sorted_holders = [(value, tuple(sorted(ranks))) for value, ranks in holders.items()]
    return tuple(sorted(sorted_holders, key=lambda item: (-len(item[1]), item[1])))


def outside_majority(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ranks of all groups but the first, the largest; empty unless more than half of all ranks are in it."""
    others = sorted(rank for group in groups[1:] for rank in group)
    return tuple(others) if len(groups[0]) > len(others) else ()


def name_ranks(ranks: Iterable[int]) -> str:
    """For example ``rank 3`` or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {text}" if len(spans) == 1 and spans[0][0] == spans[0][1] else f"ranks {text}"
