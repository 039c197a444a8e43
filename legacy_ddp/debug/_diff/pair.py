"""Where does one rank's file of A differ from one of B? The steps and phases in common are walked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from legacy_ddp.debug._diff.sections import Entry, Keep, entries, keep_all, unequal
from legacy_ddp.debug._trace.line_format import PHASES
from legacy_ddp.debug._trace.read import RankTrace
from legacy_ddp.debug._trace.records import Names

# Before the first step of a run no call was made.
_OF_A_CALL = ("local_gradients", "reduced_gradients")


def cut_short(trace: RankTrace) -> int | None:
    """The step that need not be whole, the last one: a run may end, or be left, before its optimizer has stepped."""
    return trace.steps[-1] if trace.steps else None


@dataclass(frozen=True)
class Pair:
    """Two files. ``phases``: those to compare. ``keep``: which of their entries."""

    a: RankTrace
    b: RankTrace
    phases: Sequence[str] = PHASES
    keep: Keep = keep_all

    @cached_property
    def steps(self) -> list[int]:
        """Those in both, ascending."""
        return sorted(set(self.a.steps) & set(self.b.steps))

    @cached_property
    def recorded(self) -> tuple[str, ...]:
        """The phases that both hold anywhere."""
        return tuple(phase for phase in self.phases if phase in self.a.phases and phase in self.b.phases)

    def compared(self, step: int) -> Iterator[str]:
        """The phases of a step in common that are compared: any in both; one in a single file unless it may be.

        A recorder leaves buffers out where it does not see when they change.
        """
        starts = step in (self.a.environment.first_step - 1, self.b.environment.first_step - 1)
        for phase in self.recorded:
            if starts and phase in _OF_A_CALL:
                continue
            missing = [trace for trace in (self.a, self.b) if trace.digest(step, phase) is None]
            if not missing or (len(missing) == 1 and phase != "buffers" and cut_short(missing[0]) != step):
                yield phase

    def suspects(self) -> Iterator[tuple[int, str]]:
        """Steps and phases whose names or words are not equal, in the order of training.

        Their entries may be all the same: under names in another order, or but for those that are not compared.
        """
        for step in self.steps:
            for phase in self.compared(step):
                if self.a.digest(step, phase) != self.b.digest(step, phase):
                    yield step, phase

    def differing(self, step: int, phase: str) -> tuple[list[str], tuple[str, ...]]:
        """Which names of a suspect stand for other things in A and B, and all names there."""
        names = self.a.names(step, phase)
        if names is not None and names == self.b.names(step, phase) and self._keeps(names):
            a, b = self.a.words(step, phase), self.b.words(step, phase)
            return [name for name, one, other in zip(names.names, a, b, strict=True) if one != other], names.names
        left, right = self.held(step, phase)
        return [item.name for item in unequal(left, right)], tuple(dict.fromkeys([*left, *right]))

    def held(self, step: int, phase: str) -> tuple[dict[str, Entry], dict[str, Entry]]:
        """The entries of a phase of a step in A and in B."""
        return entries(self.a.section(step, phase), self.keep), entries(self.b.section(step, phase), self.keep)

    def count(self, step: int, phase: str) -> int:
        """How many entries are compared there."""
        names = self.a.names(step, phase) or self.b.names(step, phase)
        if names is None or self.keep is keep_all or phase != "buffers":
            return len(names.names) if names else 0
        return sum(self.keep(phase, name) for name in names.names)

    def amounts(self) -> dict[tuple[int, str], int]:
        """How many entries are compared in each step and phase that has any."""
        counts = {(step, phase): self.count(step, phase) for step in self.steps for phase in self.compared(step)}
        return {place: number for place, number in counts.items() if number}

    def _keeps(self, names: Names) -> bool:
        return self.keep is keep_all or all(self.keep(names.phase, name) for name in names.names)
