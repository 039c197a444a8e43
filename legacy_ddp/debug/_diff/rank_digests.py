"""Digests of all ranks of one run, and the steps and phases in which they differ. One file is open at a time."""

from array import array
from bisect import bisect_left
from collections import Counter
from hashlib import blake2b

from legacy_ddp.debug._diff.locations import Key
from legacy_ddp.debug._diff.pair import unfinished_step
from legacy_ddp.debug._diff.sections import SHARED_PHASES, Keep, entries, keep_all
from legacy_ddp.debug._trace.read import Progress, RankTrace
from legacy_ddp.debug._trace.records import PHASES, Names
from legacy_ddp.debug._trace.run import Run, RunCoverage

_ABSENT = 0
_WHOLE_STEP = -1  # in place of the index of a phase


class RankDigests:
    """A 64-bit digest for every shared phase, step and rank.

    Memory: 40 bytes per step and rank, 40 MB for 1,000 ranks and 1,000 steps. ``phases``: the compared phases.
    ``missing``: phases which some ranks did not record. ``micro_batches``: for each step with operations on every
    rank their numbers of micro-batches. ``by_content``: digests do not depend on the order of names; every section is
    parsed.
    """

    def __init__(self, run: Run, keep: Keep, progress: Progress, *, by_content: bool = False) -> None:
        self.run_coverage = RunCoverage("")
        self._tensors: Counter[Key] = Counter()
        self.names_agree = True
        self.steps: list[int] = []
        self.micro_batches: dict[int, list[int]] = {}
        self._keep = keep
        self._by_content = by_content
        self._names: set[Names] = set()
        self._counted: set[str] = set()
        self._digests: dict[str, list[array[int]]] = {phase: [] for phase in SHARED_PHASES}
        self._excluded: set[Key] = set()
        for rank in range(run.world_size):
            with run.open(rank, progress) as trace:
                self._add_rank(rank, trace)
        recorded = self.run_coverage.phases
        self.missing = tuple(phase for phase in SHARED_PHASES if 0 < len(recorded.get(phase, ())) < run.world_size)
        self.phases = tuple(phase for phase in SHARED_PHASES if phase in self._counted and phase not in self.missing)

    @property
    def compared_steps(self) -> list[int]:
        """Steps which all ranks recorded, at least in part."""
        return [step for step in self.steps if (step, _WHOLE_STEP) not in self._excluded]

    @property
    def tensors(self) -> int:
        """Number of compared tensors, on all ranks together."""
        phases = {PHASES.index(phase) for phase in self.phases if phase != "settings"}
        return sum(count for key, count in self._tensors.items() if key[1] in phases and not self._is_excluded(key))

    def differing(self) -> list[Key]:
        """Locations in which digests differ between ranks, in the order of training."""
        found: set[Key] = set()
        for phase in self.phases:
            first, *others = self._digests[phase]
            for digests in others:
                if digests != first:
                    found.update(
                        (step, PHASES.index(phase))
                        for step, left, right in zip(self.steps, first, digests, strict=True)
                        if left != right
                    )
        return sorted(key for key in found if not self._is_excluded(key))

    def groups(self, key: Key) -> list[list[int]]:
        """Groups of ranks with equal digests in a location."""
        step, phase = key
        row = bisect_left(self.steps, step)
        ranks: dict[int, list[int]] = {}
        for rank, digests in enumerate(self._digests[PHASES[phase]]):
            ranks.setdefault(digests[row], []).append(rank)
        return list(ranks.values())

    def _is_excluded(self, key: Key) -> bool:
        return key in self._excluded or (key[0], _WHOLE_STEP) in self._excluded

    def _add_rank(self, rank: int, trace: RankTrace) -> None:
        self.run_coverage.add(rank, trace)
        if rank == 0:
            self.steps = list(trace.steps)
            self.micro_batches = {step: [] for step in trace.micro_batches}
        self.micro_batches = {
            step: [*numbers, trace.micro_batches[step]]
            for step, numbers in self.micro_batches.items()
            if step in trace.micro_batches
        }
        recorded = set(trace.steps)
        self._excluded.update((step, _WHOLE_STEP) for step in self.steps if step not in recorded)
        names: dict[int, tuple[Names, int]] = {}
        for phase in SHARED_PHASES:
            self._digests[phase].append(array("q", [self._digest(trace, step, phase, names) for step in self.steps]))
        declared = {item for item, _ in names.values()}
        self.names_agree &= rank == 0 or declared == self._names
        self._names = declared

    def _digest(self, trace: RankTrace, step: int, phase: str, known: dict[int, tuple[Names, int]]) -> int:
        """The digest of a section. ``known``: names, and the number of compared names, by the id of the names."""
        digest, names = trace.digest(step, phase), trace.names(step, phase)
        if digest is None or names is None:
            if unfinished_step(trace) == step:
                self._excluded.add((step, PHASES.index(phase)))
            return _ABSENT
        if id(names) not in known:
            known[id(names)] = names, sum(self._keep(phase, name) for name in names.names)
        if count := known[id(names)][1]:
            self._counted.add(phase)
            self._tensors[step, PHASES.index(phase)] += count
        if self._by_content or (phase == "buffers" and self._keep is not keep_all):
            return _content_digest(trace, step, phase, self._keep)
        return digest or 1


def _content_digest(trace: RankTrace, step: int, phase: str, keep: Keep) -> int:
    by_name = entries(trace.section(step, phase), keep)
    content = sorted((name, entry.identity) for name, entry in by_name.items() if entry.identity)
    if not content:
        return _ABSENT
    return int.from_bytes(blake2b(repr(content).encode(), digest_size=8).digest(), "little", signed=True) or 1
