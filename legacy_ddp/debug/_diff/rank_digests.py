"""In which steps and phases do the ranks of one run hold other words? One file is open at a time."""

from array import array
from bisect import bisect_left
from collections import Counter
from hashlib import blake2b

from legacy_ddp.debug._diff.locations import Key
from legacy_ddp.debug._diff.pair import cut_short
from legacy_ddp.debug._diff.sections import SHARED, Keep, entries, keep_all
from legacy_ddp.debug._trace.coverage import RunCoverage
from legacy_ddp.debug._trace.line_format import PHASES
from legacy_ddp.debug._trace.read import Progress, RankTrace
from legacy_ddp.debug._trace.records import Names
from legacy_ddp.debug._trace.run import Run

_ABSENT = 0
_WHOLE_STEP = -1  # in place of a phase


class RankWords:
    """Per shared phase, step and rank 64 bits of what is held, equal where that is.

    40 bytes a step and rank: 40 MB for 1,000 ranks and 1,000 steps. ``phases``: those that were compared. ``missing``:
    those that not all ranks recorded. ``by_content``: words do not depend on the order of names; then every section is
    parsed.
    """

    def __init__(self, run: Run, keep: Keep, progress: Progress, *, by_content: bool = False) -> None:
        self.extent = RunCoverage("")
        self._tensors: Counter[Key] = Counter()
        self.names_agree = True
        self.steps: list[int] = []
        self._keep = keep
        self._by_content = by_content
        self._names: set[Names] = set()
        self._counted: set[str] = set()
        self._words: dict[str, list[array[int]]] = {phase: [] for phase in SHARED}
        self._left_out: set[Key] = set()
        for rank in range(run.world_size):
            with run.open(rank, progress) as trace:
                self._take(rank, trace)
        held = self.extent.phases
        self.missing = tuple(phase for phase in SHARED if 0 < len(held.get(phase, ())) < run.world_size)
        self.phases = tuple(phase for phase in SHARED if phase in self._counted and phase not in self.missing)

    @property
    def compared(self) -> list[int]:
        """The steps that all ranks recorded, or began to."""
        return [step for step in self.steps if (step, _WHOLE_STEP) not in self._left_out]

    @property
    def tensors(self) -> int:
        """How many were compared, on all ranks together."""
        phases = {PHASES.index(phase) for phase in self.phases if phase != "settings"}
        return sum(number for key, number in self._tensors.items() if key[1] in phases and not self._is_left_out(key))

    def differing(self) -> list[Key]:
        """Where not all ranks hold the same word, in the order of training."""
        found: set[Key] = set()
        for phase in self.phases:
            first, *others = self._words[phase]
            for words in others:
                if words != first:
                    found.update(
                        (step, PHASES.index(phase))
                        for step, word, other in zip(self.steps, first, words, strict=True)
                        if word != other
                    )
        return sorted(key for key in found if not self._is_left_out(key))

    def holders(self, key: Key) -> list[list[int]]:
        """The ranks that hold the same word there, group by group."""
        step, phase = key
        row = bisect_left(self.steps, step)
        held: dict[int, list[int]] = {}
        for rank, words in enumerate(self._words[PHASES[phase]]):
            held.setdefault(words[row], []).append(rank)
        return list(held.values())

    def _is_left_out(self, key: Key) -> bool:
        return key in self._left_out or (key[0], _WHOLE_STEP) in self._left_out

    def _take(self, rank: int, trace: RankTrace) -> None:
        self.extent.add(rank, trace)
        if rank == 0:
            self.steps = list(trace.steps)
        recorded = set(trace.steps)
        self._left_out.update((step, _WHOLE_STEP) for step in self.steps if step not in recorded)
        names: dict[int, tuple[Names, int]] = {}
        for phase in SHARED:
            self._words[phase].append(array("q", [self._word(trace, step, phase, names) for step in self.steps]))
        declared = {item for item, _ in names.values()}
        self.names_agree &= rank == 0 or declared == self._names
        self._names = declared

    def _word(self, trace: RankTrace, step: int, phase: str, seen: dict[int, tuple[Names, int]]) -> int:
        word, names = trace.digest(step, phase), trace.names(step, phase)
        if word is None or names is None:
            if cut_short(trace) == step:
                self._left_out.add((step, PHASES.index(phase)))
            return _ABSENT
        if id(names) not in seen:
            seen[id(names)] = names, sum(self._keep(phase, name) for name in names.names)
        if number := seen[id(names)][1]:
            self._counted.add(phase)
            self._tensors[step, PHASES.index(phase)] += number
        if self._by_content or (phase == "buffers" and self._keep is not keep_all):
            return _word_of_content(trace, step, phase, self._keep)
        return word or 1


def _word_of_content(trace: RankTrace, step: int, phase: str, keep: Keep) -> int:
    held = entries(trace.section(step, phase), keep)
    content = sorted((name, entry.value) for name, entry in held.items() if entry.value)
    if not content:
        return _ABSENT
    return int.from_bytes(blake2b(repr(content).encode(), digest_size=8).digest(), "little", signed=True) or 1
