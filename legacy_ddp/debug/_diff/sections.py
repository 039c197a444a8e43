"""Comparison of two sections of a trace, entry by entry. Pure."""

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import hypot

from legacy_ddp.debug._diff.result import Side
from legacy_ddp.debug._trace.records import PHASES, Section

FP32_DIGIT = 2.0**-23
# Phases in which all ranks of a run are expected to hold equal values.
SHARED_PHASES = tuple(phase for phase in PHASES if phase != "local_gradients")

Keep = Callable[[str, str], bool]
"""Whether the entry with this phase and name is compared."""


@dataclass(frozen=True)
class Entry:
    """The value of one name in a section. With ``value`` None the entry counts as absent, whatever its kind."""

    kind: str
    value: str | None
    norm: float | None
    nonfinite: int

    @property
    def identity(self) -> tuple[str, str] | None:
        """Kind and value, which decide equality; None for an absent entry."""
        return None if self.value is None else (self.kind, self.value)

    def side(self, label: str) -> Side:
        return Side(label, self.value, self.norm, self.nonfinite)


ABSENT = Entry("", None, None, 0)


@dataclass(frozen=True)
class EntryDifference:
    """A name with unequal entries in A and in B."""

    name: str
    a: Entry
    b: Entry

    @property
    def kind(self) -> str:
        """Dtype and shape; both of A and of B if they differ."""
        kinds = {entry.kind for entry in (self.a, self.b) if entry.value is not None}
        return f"{self.a.kind} in A, {self.b.kind} in B" if len(kinds) > 1 else kinds.pop()

    @property
    def relative(self) -> float | None:
        """Relative difference of the norms; None if a norm is missing or leaves out non-finite elements."""
        if self.a.norm is None or self.b.norm is None or self.a.nonfinite or self.b.nonfinite:
            return None
        return relative_difference(self.a.norm, self.b.norm)


def relative_difference(a: float, b: float) -> float:
    """Difference of two norms, divided by the greater norm."""
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def greatest_difference(differences: Sequence[EntryDifference], total: float = 0.0) -> float | None:
    """The greatest relative difference of norms; None if any is unknown.

    ``total``: norm of all gradients together. A difference below the last fp32 digit of ``total`` is taken relative to
    ``total``: the gradient of a bias before BatchNorm is zero except for rounding, and its own relative difference is
    arbitrary.
    """
    shares = [share for item in differences if (share := item.relative) is not None]
    if len(shares) < len(differences) or not shares:
        return None
    return max(_share_of_total(item, share, total) for item, share in zip(differences, shares, strict=True))


def _share_of_total(item: EntryDifference, share: float, total: float) -> float:
    distance = abs((item.a.norm or 0.0) - (item.b.norm or 0.0))
    return min(share, distance / total) if distance < FP32_DIGIT * total else share


def total_norm(norms: Iterable[float | None]) -> float:
    """Norm of all tensors together, from their norms."""
    return hypot(*(norm for norm in norms if norm is not None))


def entries(section: Section | None, keep: Keep) -> dict[str, Entry]:
    """The compared entries of a section, by name."""
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
    """Names with unequal entries: first in the order of A, then the names of B alone."""
    return [
        EntryDifference(name, left, right)
        for name in dict.fromkeys([*a, *b])
        if (left := a.get(name, ABSENT)).identity != (right := b.get(name, ABSENT)).identity
    ]


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
