"""The trace files of one rank in A and in B: common steps and phases, and the entries which differ there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from legacy_ddp.debug._diff.sections import Entry, Keep, entries, entry_differences, keep_all
from legacy_ddp.debug._trace.read import RankTrace
from legacy_ddp.debug._trace.records import PHASES, Names

# Absent at the start of a run: no call was made yet.
_PHASES_OF_A_CALL = ("local_gradients", "reduced_gradients")


def unfinished_step(trace: RankTrace) -> int | None:
    """The last step, which may lack phases: a run may end before its optimizer has stepped."""
    return trace.steps[-1] if trace.steps else None


@dataclass(frozen=True)
class Pair:
    """Two trace files. ``phases``: the phases to compare. ``keep``: selects the entries to compare."""

    a: RankTrace
    b: RankTrace
    phases: Sequence[str] = PHASES
    keep: Keep = keep_all

    @cached_property
    def steps(self) -> list[int]:
        """Steps recorded in both files, ascending."""
        return sorted(set(self.a.steps) & set(self.b.steps))

    @cached_property
    def recorded_phases(self) -> tuple[str, ...]:
        """Phases recorded anywhere in both files."""
        return tuple(phase for phase in self.phases if phase in self.a.phases and phase in self.b.phases)

    def compared_phases(self, step: int) -> Iterator[str]:
        """The compared phases of a common step.

        A phase is compared if both files hold it. A phase which only one file holds is compared too (and differs),
        with two exceptions: the unfinished step of the other file; and buffers, because a recorder omits buffers when
        it cannot see their changes.
        """
        starts = step in (self.a.environment.first_step - 1, self.b.environment.first_step - 1)
        for phase in self.recorded_phases:
            if starts and phase in _PHASES_OF_A_CALL:
                continue
            missing = [trace for trace in (self.a, self.b) if trace.digest(step, phase) is None]
            if not missing or (len(missing) == 1 and phase != "buffers" and unfinished_step(missing[0]) != step):
                yield phase

    def candidates(self) -> Iterator[tuple[int, str]]:
        """Steps and phases with unequal digests, in the order of training.

        The compared entries may still be equal: the names may come in another order, or the differing entries may not
        be compared.
        """
        for step in self.steps:
            for phase in self.compared_phases(step):
                if self.a.digest(step, phase) != self.b.digest(step, phase):
                    yield step, phase

    def differing_names(self, step: int, phase: str) -> tuple[list[str], tuple[str, ...]]:
        """Names with unequal entries in A and B, and all names, of a step and phase."""
        names = self.a.names(step, phase)
        if names is not None and names == self.b.names(step, phase) and self._keeps_all_of(names):
            a, b = self.a.words(step, phase), self.b.words(step, phase)
            return [name for name, left, right in zip(names.names, a, b, strict=True) if left != right], names.names
        entries_a, entries_b = self.entries(step, phase)
        differing = [item.name for item in entry_differences(entries_a, entries_b)]
        return differing, tuple(dict.fromkeys([*entries_a, *entries_b]))

    def entries(self, step: int, phase: str) -> tuple[dict[str, Entry], dict[str, Entry]]:
        """The compared entries of a step and phase in A and in B."""
        return entries(self.a.section(step, phase), self.keep), entries(self.b.section(step, phase), self.keep)

    def entry_counts(self) -> dict[tuple[int, str], int]:
        """Number of compared entries, by step and phase; without zeros."""
        counts = {
            (step, phase): self._entry_count(step, phase) for step in self.steps for phase in self.compared_phases(step)
        }
        return {key: count for key, count in counts.items() if count}

    def _entry_count(self, step: int, phase: str) -> int:
        names = self.a.names(step, phase) or self.b.names(step, phase)
        if names is None or self.keep is keep_all or phase != "buffers":
            return len(names.names) if names else 0
        return sum(self.keep(phase, name) for name in names.names)

    def _keeps_all_of(self, names: Names) -> bool:
        return self.keep is keep_all or all(self.keep(names.phase, name) for name in names.names)
