"""How is a comparison of replicas told? Its findings as an object, and as a page of 80 columns. Pure."""

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

from legacy_ddp._compare import MAX_LINES, MISSING, Difference, name_ranks
from legacy_ddp._replicas.attribution import NOTHING, Verdict
from legacy_ddp._replicas.element_compare import WIDTH, ElementDifference

_TENSOR = re.compile(r"(\w+ \([\d, ]*\)(?: on \w+)?(?: sparse)?) [0-9a-f]{16}")  # as rows_of() says one
MAX_RANKS = 2  # told by element, of each tensor


@dataclass(frozen=True)
class ReplicaDifference:
    """One thing that ranks hold differently.

    ``kind``: ``parameters``, ``buffers``, ``gradients`` or ``optimizer``. ``name``: such as ``parameter 'fc.weight'``.
    ``holders``: each value in words (for a tensor dtype, shape and digest) and the ranks that hold it, most ranks
    first. ``elements``: for ranks outside the first group, how their tensor differs from that group's; of the first
    few tensors only.
    """

    kind: str
    name: str
    holders: tuple[tuple[str, tuple[int, ...]], ...]
    elements: Mapping[int, ElementDifference] = field(default_factory=dict)

    @property
    def parameter(self) -> str | None:
        """The parameter concerned, None for a buffer or a hyperparameter of all."""
        before, quote, rest = self.name.partition("'")
        return rest.rpartition("'")[0] if quote and not before.startswith("buffer") else None

    @property
    def tensor(self) -> str | None:
        """Dtype and shape of the tensor, if it is one, and alike but for its bits on every rank."""
        kinds = {found and found[1] for value, _ in self.holders for found in [_TENSOR.fullmatch(value)]}
        return kinds.pop() if len(kinds) == 1 else None

    @property
    def is_setting(self) -> bool:
        """Whether all ranks have it, and it is no tensor."""
        return not any(value == MISSING or _TENSOR.fullmatch(value) for value, _ in self.holders)

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks outside the strict majority, if there is one."""
        return self._difference.suspects

    @property
    def sides(self) -> str:
        """``rank 1 against ranks 0, 2``."""
        return self._difference.sides

    def __str__(self) -> str:
        if self.tensor is None:
            return "\n".join(wrap(str(self._difference), "  "))
        lines = wrap(f"{self.name}, {self.tensor}: {self.sides}", "  ")
        for rank, difference in sorted(self.elements.items())[:MAX_RANKS]:
            lines += [
                f"    rank {rank} (here) against rank {self.holders[0][1][0]} (there):",
                *difference.lines(indent="      "),
            ]
        if len(self.elements) > MAX_RANKS:
            lines.append(f"    ... {len(self.elements) - MAX_RANKS} more ranks")
        return "\n".join(lines)

    @property
    def _difference(self) -> Difference:
        return Difference(self.name, self.holders)


@dataclass(frozen=True, repr=False)
class ReplicaReport:
    """What a comparison of replicas found; equal on all ranks.

    ``call``: which one. ``compared``: how many things of each kind. ``differences``: empty if replicas are identical.
    ``phase``, ``ranks``, ``minority``, ``implicated``, ``cause``: since when, who and why, as far as that can be told.
    ``generators``: groups of ranks whose random generators stand alike; they need not.
    ``notes``: what was not compared, and why.
    """

    call: str
    size: int
    compared: Mapping[str, int]
    differences: tuple[ReplicaDifference, ...] = ()
    verdict: Verdict = NOTHING
    generators: tuple[tuple[int, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._headline()}>"

    @property
    def identical(self) -> bool:
        """Whether all ranks hold the same bits in everything that was compared."""
        return not self.differences and not self.verdict.phase

    @property
    def phase(self) -> str:
        """Since when: see :class:`legacy_ddp.ReplicaDivergenceError`; empty if replicas are identical."""
        return self.verdict.phase

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks at fault; empty where nothing tells them apart, or ``implicated`` names ranks of the majority."""
        return self.verdict.ranks

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks outside the strict majority, by counting alone; empty where there is no majority."""
        return self.verdict.minority

    @property
    def implicated(self) -> tuple[int, ...]:
        """The ranks with evidence against them, whatever the others hold; empty if there is none, or against all."""
        return self.verdict.implicated

    @property
    def cause(self) -> str:
        """Why, in words."""
        return self.verdict.cause

    def __str__(self) -> str:
        lines = wrap(self._headline(), "")
        if not self.identical:
            lines += wrap(f"who: {self.verdict.who}", "  ")
            lines += wrap(f"since: {self.verdict.since}", "  ")
            lines += wrap(f"why: {self.cause}", "  ")
            lines += [str(difference) for difference in self.differences[:MAX_LINES]]
        if len(self.differences) > MAX_LINES:
            lines.append(f"  ... {len(self.differences) - MAX_LINES} more")
        return "\n".join([*lines, *(line for note in self._notes() for line in wrap(f"note: {note}", "  "))])

    def _headline(self) -> str:
        if self.identical:
            counts = ", ".join(_count(number, kind) for kind, number in self.compared.items() if number)
            ranks = f"{self.size} rank{'s' * (self.size > 1)}"
            return f"{self.call}: replicas are identical: {ranks}, {counts or 'nothing to compare'}"
        differing = {kind: sum(item.kind == kind for item in self.differences) for kind in self.compared}
        counts = ", ".join(f"{n} of {_count(self.compared[kind], kind)}" for kind, n in differing.items() if n)
        return f"{self.call}: replicas differ in {counts or 'what they did since the last call'}"

    def _notes(self) -> list[str]:
        if not self.generators or self.size == 1:
            return list(self.notes)
        alike = [group for group in self.generators if len(group) > 1]
        where = f"stand alike on {' and on '.join(map(name_ranks, alike))}" if alike else "differ on all ranks"
        return [*self.notes, f"random generators {where}, as they may"]


def wrap(text: str, indent: str) -> list[str]:
    """Lines of at most WIDTH columns; what does not fit is continued deeper."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


_ONE = {"parameters": "parameter", "buffers": "buffer", "gradients": "gradient", "optimizer": "optimizer entry"}
_MANY = {**{kind: kind for kind in _ONE}, "optimizer": "optimizer entries"}


def _count(number: int, kind: str) -> str:
    return f"{number} {(_ONE if number == 1 else _MANY)[kind]}"
