"""Report of a comparison of replicas: an object, its text of 80 columns, and lost optimizer state as a cause. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from legacy_ddp._explain.attribution import NOTHING, Verdict
from legacy_ddp._explain.element_compare import ElementDifference
from legacy_ddp._replicas.state import EARLIER_STATE, MEMBERSHIP, NONE, WEIGHTS
from legacy_ddp._text import MAX_LINES, MAX_SIDES, MISSING, Difference, first_few, name_ranks, wrap

_wrap = partial(wrap, break_words=False)  # a user may search for a long name
MAX_RANKS = 2  # ranks with element differences in the text, for each tensor
_ONE = {"parameters": "parameter", "buffers": "buffer", "gradients": "gradient", "optimizer": "optimizer entry"}
_MANY = {**{kind: kind for kind in _ONE}, "optimizer": "optimizer entries"}
_PARTS = re.compile(r"(optimizer \d+: )?(.+?)(?: of ('.*'|\".*\"|parameter group \d+))?", re.DOTALL)
_SCALAR = re.compile(r"(\w+ \(\)(?: on \w+)?) (\S+(?: \(.*\))?)")  # a number in the texts of describe_items()
_DIGEST = re.compile(r"(\w+ \([\d, ]*\)(?: on \w+)?(?: sparse)?) [0-9a-f]{16}")
_UNIT = {"": "optimizer", "'": "parameter", '"': "parameter", "p": "parameter group"}  # by the first letter of a holder
_RESUMED = "perhaps resumed without optimizer.load_state_dict()"

Kind = tuple[str, str]  # the key of the state or of the hyperparameter, and the unit that has the key
Values = tuple[tuple[str, tuple[int, ...]], ...]  # each value and its ranks, most ranks first


@dataclass(frozen=True)
class ReplicaDifference(Difference):
    """A tensor or setting that differs between ranks.

    ``name``: for example ``parameter 'fc.weight'``. ``holders``: each value as text and the ranks with this value, the
    largest group of ranks first. The text of a tensor is dtype, shape and digest; of a tensor without dimensions in an
    optimizer, dtype, shape and number. ``kind``: ``parameters``, ``buffers``, ``gradients`` or ``optimizer``.
    ``elements``: for ranks outside the first group, the difference of their tensor from the tensor of the first group;
    only for the first few tensors.

    Example:
        >>> if rank == 1:
        ...     model.module.weight.data[0, 1] = 5.0
        >>> (difference,) = check_replicas(model).differences
        >>> difference.parameter, difference.suspects
        ('weight', (1,))
    """

    kind: str
    elements: Mapping[int, ElementDifference] = field(default_factory=dict)

    @property
    def parameter(self) -> str | None:
        """The parameter concerned; None for a buffer or a hyperparameter of a group."""
        before, quote, rest = self.name.partition("'")
        return rest.rpartition("'")[0] if quote and not before.startswith("buffer") else None

    @property
    def tensor(self) -> str | None:
        """Dtype and shape of a tensor that differs only in its bits; otherwise None."""
        kinds = {tensor_type(value) for value, _ in self.holders}
        return (kinds.pop() or None) if len(kinds) == 1 else None

    @property
    def is_setting(self) -> bool:
        """Whether the difference is in a setting that all ranks have."""
        return not any(value == MISSING or has_tensor(value) for value, _ in self.holders)

    def __str__(self) -> str:
        if self.tensor is None:
            holders = plain_numbers(self.holders)
            # The largest group and the smallest groups, of which a rank at fault is usually one.
            shown = Difference(self.name, (holders[0], *holders[1:][-MAX_SIDES + 1 :]))
            more = f"; {len(holders) - MAX_SIDES} more values" if len(holders) > MAX_SIDES else ""
            return "\n".join(_wrap(f"{shown}{more}", "  "))
        lines = _wrap(f"{self.name}, {self.tensor}: {self.sides}", "  ")
        for rank, difference in sorted(self.elements.items())[:MAX_RANKS]:
            lines += [
                f"    rank {rank} (here) against rank {self.holders[0][1][0]} (there):",
                *difference.lines(indent="      "),
            ]
        if len(self.elements) > MAX_RANKS:
            lines.append(f"    ... {len(self.elements) - MAX_RANKS} more ranks")
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class ReplicaReport:
    """The result of a comparison of replicas; equal on all ranks.

    ``call``: operation and number of the call. ``size``: the number of ranks. ``compared``: the number of compared
    tensors and settings of each kind; a missing gradient counts only after a difference. ``differences``: empty if
    replicas are identical. ``phase``, ``ranks``, ``minority``, ``implicated``, ``cause``: the attribution, empty where
    unknown. ``generators``: groups of ranks with equal random generators, which may differ. ``notes``: the items that
    were not compared, with the reason. ``entry_counts``: the number of parameters, parameter groups or optimizers that
    have an optimizer entry, by the key of the entry and the unit, after a difference.

    The text has a line for each kind of optimizer entries that differs, then the other differences. Each part ends
    after 10 items. If all parameters differ, and more than 10, the text has those that were compared element by
    element. ``differences`` has all of them.

    Example:
        >>> check_replicas(model).identical
        True
        >>> if rank == 1:
        ...     model.module.weight.data[0, 1] = 5.0
        >>> report = check_replicas(model)
        >>> report.identical, report.minority
        (False, (1,))
    """

    call: str
    size: int
    compared: Mapping[str, int]
    differences: tuple[ReplicaDifference, ...] = ()
    verdict: Verdict = NOTHING
    generators: tuple[tuple[int, ...], ...] = ()
    notes: tuple[str, ...] = ()
    entry_counts: Mapping[Kind, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._headline()}>"

    @property
    def identical(self) -> bool:
        """Whether all compared items have the same bits on all ranks."""
        return not self.differences and not self.verdict.phase

    @property
    def phase(self) -> str:
        """The phase of the first difference, see :class:`legacy_ddp.ReplicaDivergenceError`; empty if identical."""
        return self.verdict.phase

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks at fault; empty if unknown, or if ``implicated`` names ranks of the majority."""
        return self.verdict.ranks

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks outside the strict majority, by counting alone; empty without a strict majority."""
        return self.verdict.minority

    @property
    def implicated(self) -> tuple[int, ...]:
        """The ranks with evidence against them, by evidence alone; empty with evidence against none or all ranks."""
        return self.verdict.implicated

    @property
    def cause(self) -> str:
        """The cause as text."""
        return self.verdict.cause

    def __str__(self) -> str:
        lines = _wrap(self._headline())
        if not self.identical:
            lines += _wrap(f"who: {self.verdict.who}", "  ")
            lines += _wrap(f"since: {self.verdict.since}", "  ")
            lines += _wrap(f"why: {self.cause}", "  ")
            lines += self._describe_differences()
        return "\n".join([*lines, *(line for note in self._notes() for line in _wrap(f"note: {note}", "  "))])

    def _headline(self) -> str:
        if self.identical:
            counts = ", ".join(_count(number, kind) for kind, number in self.compared.items() if number)
            ranks = f"{self.size} rank{'s' * (self.size > 1)}"
            return f"{self.call}: replicas are identical: {ranks}, {counts or 'nothing to compare'}"
        differing = {kind: sum(item.kind == kind for item in self.differences) for kind in self.compared}
        counts = ", ".join(f"{n} of {_count(self.compared[kind], kind)}" for kind, n in differing.items() if n)
        return f"{self.call}: replicas differ in {counts or 'the history since the last call'}"

    def _describe_differences(self) -> list[str]:
        # The optimizer entries first: two lines about them explain more than the values of a thousand weights.
        kinds = group_entries((item for item in self.differences if item.kind == "optimizer"), self.entry_counts)
        single = {kind.differences[0].name for kind in kinds if len(kind.differences) == 1}
        lines = []
        for kind in kinds[:MAX_LINES]:
            first, *more = kind.differences
            lines += _wrap(kind.line, "  ") if more else [str(first)]
        lines += [f"  ... {len(kinds) - MAX_LINES} more kinds of optimizer entries"] * (len(kinds) > MAX_LINES)
        others = [
            item for item in self.differences if item.kind != "optimizer" or (item.elements and item.name not in single)
        ]
        return [*lines, *self._describe_others(others)]

    def _describe_others(self, others: list[ReplicaDifference]) -> list[str]:
        # If all of many parameters differ, the names of the first ten do not help.
        has_all = all(item.kind == "parameters" for item in others) and len(others) == self.compared.get("parameters")
        detailed = [item for item in others if item.elements]
        if has_all and detailed and len(others) > MAX_LINES:
            return [*map(str, detailed), f"  ... and the other {len(others) - len(detailed)}: all parameters differ"]
        return first_few(others, MAX_LINES, "  ... {} more")

    def _notes(self) -> list[str]:
        if not self.generators or self.size == 1:
            return list(self.notes)
        equal = [group for group in self.generators if len(group) > 1]
        where = f"are equal on {' and on '.join(map(name_ranks, equal))}" if equal else "differ on all ranks"
        return [*self.notes, f"random generators {where}; they need not agree"]


def unlike_tensors(differences: Iterable[ReplicaDifference]) -> list[str]:
    """Names of parameters and buffers that a broadcast cannot make equal: missing, or of another dtype or shape."""
    return [item.name for item in differences if item.kind in ("parameters", "buffers") and item.tensor is None]


def _count(number: int, kind: str) -> str:
    return f"{number} {(_ONE if number == 1 else _MANY)[kind]}"


def tensor_type(value: str) -> str:
    """Dtype, shape and layout of a value with a digest; empty for a number, a setting and a missing value."""
    found = _DIGEST.fullmatch(value)
    return found[1] if found else ""


def has_tensor(value: str) -> bool:
    """Whether the value is of a tensor: a digest, or the number of a tensor without dimensions."""
    return bool(_DIGEST.fullmatch(value) or _SCALAR.fullmatch(value))


def plain_numbers(holders: Values) -> Values:
    """``holders`` without dtypes, if all values are missing or of tensors of one dtype without dimensions."""
    found = [_SCALAR.fullmatch(value) for value, _ in holders]
    if len({match[1] for match in found if match}) != 1 or not all(
        match or value == MISSING for match, (value, _) in zip(found, holders, strict=True)
    ):
        return holders
    return tuple((match[2] if match else value, ranks) for match, (value, ranks) in zip(found, holders, strict=True))


class Entry(NamedTuple):
    """The name of an optimizer entry in two parts: ``exp_avg`` and ``'fc.weight'``, for example.

    ``kind``: of a nested value, with the outermost key.
    """

    kind: Kind
    holder: str  # a parameter, a parameter group or an optimizer

    @classmethod
    def of(cls, name: str) -> "Entry":
        """``name``: of a :class:`StateItem`."""
        found = _PARTS.fullmatch(name)
        assert found is not None
        optimizer, key, holder = found[1] or "", found[2], found[3] or ""
        return cls((key.rpartition(" in ")[2], _UNIT[holder[:1]]), optimizer + holder)


def count_holders(names: Iterable[str]) -> dict[Kind, int]:
    """How many parameters, parameter groups or optimizers have an entry of each kind. ``names``: of all entries."""
    return dict(Counter(entry.kind for entry in {Entry.of(name) for name in names}))


@dataclass(frozen=True)
class EntryKind:
    """The entries of one kind that differ."""

    kind: Kind
    differences: tuple[Difference, ...]
    total: int  # of the holders that have an entry of this kind on any rank

    @property
    def is_state(self) -> bool:
        return self.kind[1] == "parameter" and self.kind[0] not in (MEMBERSHIP, WEIGHTS)

    @property
    def is_setting(self) -> bool:
        return self.kind[1] == "parameter group"

    @property
    def values(self) -> Values:
        """The values and their ranks, if all entries have the same, and these are short texts; otherwise empty."""
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
    """The differences by kind. ``totals``: see :func:`count_holders`."""
    found: dict[Kind, list[Difference]] = {}
    for item in differences:
        found.setdefault(Entry.of(item.name).kind, []).append(item)
    kinds = [EntryKind(kind, tuple(items), totals.get(kind, len(items))) for kind, items in found.items()]
    # Hyperparameters first, then state with short values: a number tells more than a digest.
    return sorted(kinds, key=lambda kind: (kind.is_state, not kind.values, not kind.missing))


def explain_loss(kinds: Sequence[EntryKind], totals: Mapping[Kind, int]) -> str:
    """A text on ranks that lost their optimizer state, if the entries show this; otherwise empty.

    ``kinds``: from :func:`group_entries`.
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
    """The cause of different step counts; empty if the values are not numbers."""
    try:
        counts = {float(value): ranks for value, ranks in values}
    except ValueError:
        return ""
    behind = tuple(sorted(rank for count, ranks in counts.items() if count < max(counts) for rank in ranks))
    if not behind:  # also if there are no values, because they differ between parameters
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
