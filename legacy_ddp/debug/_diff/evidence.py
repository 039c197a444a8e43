"""Facts about the first divergence, from which its explanation is written. Pure."""

from dataclasses import dataclass
from typing import Literal

from legacy_ddp.debug._diff.growth import Growth
from legacy_ddp.debug._diff.result import Divergence

Kind = Literal["runs", "sizes", "ranks"]
"""Two runs, two runs of different world sizes, or the ranks of one run."""

_PHASES_BEFORE = {"reduced_gradients": "reduced gradients", "settings": "settings", "optimizer": "optimizer state"}


@dataclass(frozen=True)
class Evidence:
    """Facts about the first divergence.

    ``compared``: phases recorded on both sides. ``previous``: the last compared step before the divergence, None
    without any. ``is_start``: the divergence is at the start of a run; ``starting_run``: A or B if only this run starts
    there. ``causes``: names of the possible causes. ``inputs_known``, ``generators_known``: inputs and random
    generators of the differing ranks were recorded. ``reproducible``: sums do not depend on the world size. ``size``:
    as in :class:`Comparison`.
    """

    kind: Kind
    first: Divergence
    compared: tuple[str, ...]
    is_start: bool
    previous: int | None
    starting_run: str = ""
    causes: frozenset[str] = frozenset()
    inputs_known: bool = False
    generators_known: bool = False
    reproducible: bool = False
    size: float | None = None
    growth: Growth | None = None

    @property
    def only_side(self) -> str:
        """Label of the only side with a value; empty if several sides have a value."""
        labels = [side.label for side in self.first.sides if side.value is not None]
        return labels[0] if len(labels) == 1 else ""

    @property
    def values(self) -> str:
        """``lr of parameter group 0 is 0.1 in A and 0.2 in B``."""
        sides = [f"{side.value or 'nothing'} in {side.label}" for side in self.first.sides]
        return f"{self.first.name} is {' and '.join(sides)}"

    @property
    def earlier_phases(self) -> str:
        """Beginning of a sentence: the earlier phases of the step which agree, and those without a record."""
        phases = list(_PHASES_BEFORE)
        earlier = phases[: phases.index(self.first.phase)] if self.first.phase in phases else phases
        agree = [_PHASES_BEFORE[phase] for phase in earlier if phase in self.compared]
        missing = [_PHASES_BEFORE[phase] for phase in earlier if phase not in self.compared and phase != "optimizer"]
        text = f"{' and '.join(missing)} were not recorded; " if missing else ""
        if agree:
            *others, last = agree
            text += f"{', '.join(others)} and {last} agree, so " if others else f"{last} agree, so "
        return text[:1].upper() + text[1:]
