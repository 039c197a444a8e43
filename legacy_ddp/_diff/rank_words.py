"""In which steps and phases do the ranks of one run hold other words? One file is open at a time."""

from array import array
from hashlib import blake2b

from legacy_ddp._diff.pair import cut_short
from legacy_ddp._diff.places import Key
from legacy_ddp._diff.sections import SHARED, Keep, entries, keep_all
from legacy_ddp._trace.extent import Extent
from legacy_ddp._trace.lines import PHASES
from legacy_ddp._trace.read import Progress, RankTrace
from legacy_ddp._trace.records import Names
from legacy_ddp._trace.run import Run

_ABSENT = 0
_WHOLE_STEP = -1  # in place of a phase


class RankWords:
    """Per shared phase, step and rank 64 bits of what is held, equal where that is.

    40 bytes a step and rank: 40 MB for 1,000 ranks and 1,000 steps. ``phases``: those that were compared. ``missing``:
    those that not all ranks recorded. ``by_content``: words do not depend on the order of names; then every section is
    parsed.
    """

    def __init__(self, run: Run, keep: Keep, progress: Progress, *, by_content: bool = False) -> None:
        self.extent = Extent("")
        self.tensors = 0
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
        return sorted(key for key in found if key not in self._left_out and (key[0], _WHOLE_STEP) not in self._left_out)

    def holders(self, key: Key) -> dict[str, list[int]]:
        """Each word there, and the ranks that hold it."""
        step, phase = key
        row = self.steps.index(step)
        held: dict[str, list[int]] = {}
        for rank, words in enumerate(self._words[PHASES[phase]]):
            held.setdefault(str(words[row]), []).append(rank)
        return held

    def _take(self, rank: int, trace: RankTrace) -> None:
        self.extent.take(rank, trace)
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
        word, names = trace.word(step, phase), trace.names(step, phase)
        if word is None or names is None:
            if cut_short(trace) == step:
                self._left_out.add((step, PHASES.index(phase)))
            return _ABSENT
        if id(names) not in seen:
            seen[id(names)] = names, sum(self._keep(phase, name) for name in names.names)
        if number := seen[id(names)][1]:
            self._counted.add(phase)
            self.tensors += number if phase != "settings" else 0
        if self._by_content or (phase == "buffers" and self._keep is not keep_all):
            return _word_of_content(trace, step, phase, self._keep)
        return word or 1


def _word_of_content(trace: RankTrace, step: int, phase: str, keep: Keep) -> int:
    held = entries(trace.section(step, phase), keep)
    content = sorted((name, entry.value) for name, entry in held.items() if entry.value)
    if not content:
        return _ABSENT
    return int.from_bytes(blake2b(repr(content).encode(), digest_size=8).digest(), "little", signed=True) or 1
