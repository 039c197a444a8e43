"""Optimizer entries that differ between replicas: a line for each kind of entry, and lost state as a cause. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from legacy_ddp._replicas.state import EARLIER_STATE, MEMBERSHIP, NONE, WEIGHTS
from legacy_ddp._text import MAX_SIDES, MISSING, Difference, name_ranks

_PARTS = re.compile(r"(optimizer \d+: )?(.+?)(?: of ('.*'|\".*\"|parameter group \d+))?", re.DOTALL)
_SCALAR = re.compile(r"(\w+ \(\)(?: on \w+)?) (\S+(?: \(.*\))?)")  # a number in the texts of describe_items()
_DIGEST = re.compile(r"(\w+ \([\d, ]*\)(?: on \w+)?(?: sparse)?) [0-9a-f]{16}")
_UNIT = {"": "optimizer", "'": "parameter", '"': "parameter", "p": "parameter group"}  # by the first letter of a holder
_RESUMED = "perhaps resumed without optimizer.load_state_dict()"

Kind = tuple[str, str]  # the key of the state or of the hyperparameter, and the unit that has the key
Values = tuple[tuple[str, tuple[int, ...]], ...]  # each value and its ranks, most ranks first


def tensor_type(value: str) -> str:
    """Dtype, shape and layout of a value with a digest; empty for a number, a setting and a missing value."""
    found = _DIGEST.fullmatch(value)
    return found[1] if found else ""


def has_tensor(value: str) -> bool:
    """Whether the value is of a tensor: a digest, or the number of a tensor without dimensions."""
    return bool(_DIGEST.fullmatch(value) or _SCALAR.fullmatch(value))


def plain_numbers(holders: Values) -> Values:
    """``holders`` with bare numbers, if all of them are tensors of a single dtype without dimensions."""
    found = [_SCALAR.fullmatch(value) for value, _ in holders]
    if len({match[1] for match in found if match}) != 1 or not all(
        match or value == MISSING for match, (value, _) in zip(found, holders, strict=True)
    ):
        return holders
    return tuple((match[2] if match else value, ranks) for match, (value, ranks) in zip(found, holders, strict=True))


class Entry(NamedTuple):
    """The name of an optimizer entry in two parts: ``exp_avg`` and ``'fc.weight'``, for example.

    ``holder``: a parameter, a parameter group or an optimizer. Of a nested value, ``key`` is the outermost key.
    """

    kind: Kind
    holder: str

    @classmethod
    def of(cls, name: str) -> "Entry":
        """The parts of the name of a :class:`StateItem`."""
        found = _PARTS.fullmatch(name)
        assert found is not None
        optimizer, key, holder = found[1] or "", found[2], found[3] or ""
        return cls((key.rpartition(" in ")[2], _UNIT[holder[:1]]), optimizer + holder)


def count_holders(names: Iterable[str]) -> dict[Kind, int]:
    """How many parameters, parameter groups or optimizers have an entry of each kind. ``names``: of all entries."""
    return dict(Counter(entry.kind for entry in {Entry.of(name) for name in names}))


@dataclass(frozen=True)
class EntryKind:
    """The entries of one kind that differ. ``total``: how many holders have an entry of the kind, on any rank."""

    kind: Kind
    differences: tuple[Difference, ...]
    total: int

    @property
    def is_state(self) -> bool:
        """Whether these entries are state of parameters, and not a hyperparameter or weights."""
        return self.kind[1] == "parameter" and self.kind[0] not in (MEMBERSHIP, WEIGHTS)

    @property
    def is_setting(self) -> bool:
        """Whether these entries are a hyperparameter of parameter groups."""
        return self.kind[1] == "parameter group"

    @property
    def values(self) -> Values:
        """The values and their ranks, if they are equal in all entries, and short; otherwise empty."""
        (first, *others) = {item.holders for item in self.differences}
        return () if others or any(tensor_type(value) for value, _ in first) else plain_numbers(first)

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks without any of these entries, if the other ranks have them all; otherwise empty."""
        ranks = {dict(item.holders).get(MISSING, ()) for item in self.differences}
        return ranks.pop() if len(ranks) == 1 else ()

    @property
    def count(self) -> int:
        """The number of holders with a difference."""
        return len({Entry.of(item.name).holder for item in self.differences})

    @property
    def line(self) -> str:
        """For example ``optimizer state: `step` is 1 on rank 1, 21 on ranks 0, 2, in 20 of 20 parameters``."""
        key, unit = self.kind
        start = f"optimizer{' state' * self.is_state}: `{key}`"
        where = f"in {self.count} of {self.total} {unit}{'s' * (self.total > 1)}"
        if self.values:
            return f"{start} is {_name_values(self.values)}, {where}"
        if self.missing and all(len(item.holders) == 2 for item in self.differences):
            return f"{start} is missing on {name_ranks(self.missing)}, {where}"
        sides = list(dict.fromkeys(item.sides for item in self.differences))
        more = [f"or in {len(sides) - 2} more ways"] if len(sides) > 2 else []
        return f"{start} differs {where}: {'; '.join([*sides[:2], *more])}"


def group_entries(differences: Iterable[Difference], totals: Mapping[Kind, int]) -> list[EntryKind]:
    """The differences by kind. Hyperparameters first, then state with short values: a number tells more than digests.

    ``totals``: see :func:`count_holders`.
    """
    found: dict[Kind, list[Difference]] = {}
    for item in differences:
        found.setdefault(Entry.of(item.name).kind, []).append(item)
    kinds = [EntryKind(kind, tuple(items), totals.get(kind, len(items))) for kind, items in found.items()]
    return sorted(kinds, key=lambda kind: (kind.is_state, not kind.values, not kind.missing))


def explain_loss(kinds: Sequence[EntryKind], totals: Mapping[Kind, int]) -> str:
    """How the entries show that ranks lost their optimizer state, as text; empty if they do not show it.

    ``kinds``: of :func:`group_entries`.
    """
    of_state = [kind for kind in totals if EntryKind(kind, (), 0).is_state]
    lacking = {item.missing if item.count == item.total else () for item in kinds if item.is_state}
    if len(lacking) == 1 and (ranks := lacking.pop()) and of_state == [k for k in of_state if _find(k, kinds)]:
        has = "have" if len(ranks) > 1 else "has"
        return f"{name_ranks(ranks)} {has} no optimizer state, unlike the others: {_RESUMED}"
    earlier = _find((EARLIER_STATE, "optimizer"), kinds)
    if earlier is not None and earlier.values:
        ranks = tuple(sorted(dict(earlier.values)[NONE]))
        return f"{name_ranks(ranks)} had no optimizer state before the last step(), unlike the others: {_RESUMED}"
    steps = _find(("step", "parameter"), kinds)
    return _explain_steps(steps.values) if steps is not None and steps.count == steps.total else ""


def _explain_steps(values: Values) -> str:
    """The cause of different step counts; empty if they are no numbers."""
    try:
        counts = {float(value): ranks for value, ranks in values}
    except ValueError:
        return ""
    behind = tuple(sorted(rank for count, ranks in counts.items() if count < max(counts) for rank in ranks))
    if not behind:  # also of values that differ between parameters
        return ""
    have = f"`step` is {_name_values(values)}: {name_ranks(behind)}"
    if all(2 * count <= max(counts) for count in counts if count < max(counts)):
        return f"{have} lost optimizer state ({_RESUMED}), or left out steps"
    return f"{have} left out steps, or loaded older optimizer state"


def _find(kind: Kind, kinds: Iterable[EntryKind]) -> EntryKind | None:
    return next((item for item in kinds if item.kind == kind), None)


def _name_values(values: Values) -> str:
    """For example ``1 on rank 1, 21 on ranks 0, 2``: the smallest group first, and the largest group always."""
    shown = [*values[1:][::-1][: MAX_SIDES - 1], values[0]]
    names = [f"{'missing' if value == MISSING else value.removesuffix('.0')} on {name_ranks(r)}" for value, r in shown]
    more = [f"{len(values) - MAX_SIDES} more values"] if len(values) > MAX_SIDES else []
    return ", ".join([*names, *more])
