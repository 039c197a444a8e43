"""In which of their entries do two sections differ? Pure."""

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import hypot

from legacy_ddp.debug._diff.result import Side
from legacy_ddp.debug._trace.line_format import PHASES
from legacy_ddp.debug._trace.records import Section

FP32_DIGIT = 2.0**-23
# What the ranks of a run have in common.
SHARED = tuple(phase for phase in PHASES if phase != "local_gradients")

Keep = Callable[[str, str], bool]
"""Whether the entry of that phase and name is compared."""


@dataclass(frozen=True)
class Entry:
    """What one name of a section stands for. A ``word`` of None is nothing, whatever its kind."""

    kind: str
    word: str | None
    norm: float | None
    nonfinite: int

    @property
    def value(self) -> tuple[str, str] | None:
        """What judges."""
        return None if self.word is None else (self.kind, self.word)

    def side(self, label: str) -> Side:
        return Side(label, self.word, self.norm, self.nonfinite)


NOTHING = Entry("", None, None, 0)


@dataclass(frozen=True)
class Unequal:
    """One name, and what it stands for in A and in B."""

    name: str
    a: Entry
    b: Entry

    @property
    def kind(self) -> str:
        """Dtype and shape, in A and in B where they differ."""
        kinds = {entry.kind for entry in (self.a, self.b) if entry.word is not None}
        return f"{self.a.kind} in A, {self.b.kind} in B" if len(kinds) > 1 else kinds.pop()

    @property
    def relative(self) -> float | None:
        """Relative difference of the norms; None where one has none, or is not finite."""
        if self.a.norm is None or self.b.norm is None or self.a.nonfinite or self.b.nonfinite:
            return None
        return relative(self.a.norm, self.b.norm)


def relative(a: float, b: float) -> float:
    """The difference of two norms, as a share of the greater one."""
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def greatest(found: Sequence[Unequal], whole: float = 0.0) -> float | None:
    """The greatest relative difference of norms; None where one cannot be told.

    ``whole``: the norm of all gradients there. What is below its last fp32 digit is a share of it: the gradient of a
    bias before BatchNorm is zero but for rounding, and may differ by any share of itself.
    """
    shares = [share for item in found if (share := item.relative) is not None]
    if len(shares) < len(found) or not shares:
        return None
    return max(_beside(item, share, whole) for item, share in zip(found, shares, strict=True))


def _beside(item: Unequal, share: float, whole: float) -> float:
    distance = abs((item.a.norm or 0.0) - (item.b.norm or 0.0))
    return min(share, distance / whole) if distance < FP32_DIGIT * whole else share


def whole_norm(norms: Iterable[float | None]) -> float:
    """The norm of all of it together."""
    return hypot(*(norm for norm in norms if norm is not None))


def entries(section: Section | None, keep: Keep) -> dict[str, Entry]:
    """The entries that are compared, by name."""
    if section is None:
        return {}
    names, values = section.names, section.values
    together = zip(names.names, names.kinds, values.words, values.norms, strict=True)
    return {
        name: Entry(kind, word, norm, values.nonfinite.get(index, 0))
        for index, (name, kind, word, norm) in enumerate(together)
        if keep(names.phase, name)
    }


def unequal(a: dict[str, Entry], b: dict[str, Entry]) -> list[Unequal]:
    """Names that stand for other things, in the order of A, then what B has beyond; nothing is as good as absent."""
    return [
        Unequal(name, left, right)
        for name in dict.fromkeys([*a, *b])
        if (left := a.get(name, NOTHING)).value != (right := b.get(name, NOTHING)).value
    ]


def keep_all(_phase: str, _name: str) -> bool:
    return True


def keep_shared(patterns: Sequence[str]) -> Keep:
    """All but the buffers that match one of ``patterns``: every rank has its own of those."""

    def keep(phase: str, name: str) -> bool:
        return phase != "buffers" or not any(fnmatchcase(_raw(name), pattern) for pattern in patterns)

    return keep if patterns else keep_all


def _raw(name: str) -> str:
    """``bn.running_mean`` of ``buffer 'bn.running_mean'``."""
    quoted = name.removeprefix("buffer ")
    try:
        return str(ast.literal_eval(quoted))
    except (ValueError, SyntaxError):
        return quoted
