"""Comparison of the ranks of one run in the phases that ranks share. A majority is named, but not called right."""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

from legacy_ddp._compare import MAX_SIDES, Difference, compare_rows, name_ranks
from legacy_ddp.debug._diff.causes import EXCLUDED, by_likelihood
from legacy_ddp.debug._diff.coverage import (
    format_steps,
    local_buffer_notes,
    optimizer_notes,
    phase_labels,
    uncompared_steps,
)
from legacy_ddp.debug._diff.explain import Evidence, explain
from legacy_ddp.debug._diff.locations import MAX_OTHERS, Key, LocationMask, NameMasks, bit_mask, merge
from legacy_ddp.debug._diff.operations import RankOperations, with_operations
from legacy_ddp.debug._diff.pair import (
    ABSENT,
    SHARED_PHASES,
    Entry,
    Keep,
    Pair,
    entries,
    keep_all,
    keep_shared,
    unfinished_step,
)
from legacy_ddp.debug._diff.result import Cause, Comparison, Divergence, Side, Verdict
from legacy_ddp.debug._trace.read import Progress, RankTrace
from legacy_ddp.debug._trace.records import PHASE_LABELS, PHASES, Names
from legacy_ddp.debug._trace.run import Run, RunCoverage

_ABSENT = 0
_WHOLE_STEP = -1  # in place of the index of a phase
Group = tuple[Entry, list[int]]
"""An entry, and the ranks which hold it."""
_DIVERGENCE_ERROR = "ReplicaDivergenceError"
# Expected to differ between ranks.
_FACTS_OF_A_RANK = (*EXCLUDED, "seed", "devices")


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


def read_divergences(run: Run, key: Key, keep: Keep) -> list[Divergence]:
    """The divergences in a location, in the order of names. One file is open at a time."""
    step, phase = key[0], PHASES[key[1]]
    groups: dict[str, dict[tuple[str, str], Group]] = {}
    for rank in range(run.world_size):
        with run.open(rank, until=step) as trace:
            for name, entry in entries(trace.section(step, phase), keep).items():
                if entry.identity:
                    groups.setdefault(name, {}).setdefault(entry.identity, (entry, []))[1].append(rank)
    by_name = {name: _with_absent(list(found.values()), run.world_size) for name, found in groups.items()}
    return [_divergence(step, phase, name, found) for name, found in by_name.items() if len(found) > 1]


def _with_absent(groups: list[Group], world_size: int) -> list[Group]:
    """The groups with a group of the remaining ranks, greatest group first."""
    having = {rank for _, ranks in groups for rank in ranks}
    if without := [rank for rank in range(world_size) if rank not in having]:
        groups.append((ABSENT, without))
    return sorted(groups, key=lambda group: _greatest_first(group[1]))


def _divergence(step: int, phase: str, name: str, groups: list[Group]) -> Divergence:
    return Divergence(
        step=step,
        phase=phase,
        name=name,
        kind=" or ".join(dict.fromkeys(entry.kind for entry, _ in groups if entry.value is not None)),
        ranks=_outside_majority([ranks for _, ranks in groups]),
        sides=tuple(entry.side(name_ranks(ranks)) for entry, ranks in groups),
    )


def read_masks(run: Run, groups: Mapping[Key, Sequence[Sequence[int]]], keep: Keep) -> dict[Key, LocationMask]:
    """Ranks and names with a difference, for every location. Two files are open at a time.

    ``groups``: for every location, the groups of ranks with equal digests. One rank of each group is compared with
    rank 0.
    """
    wanted: dict[int, list[Key]] = {}
    masks: dict[Key, LocationMask] = {}
    for key, found in groups.items():
        ranks = _outside_majority(sorted(map(list, found), key=_greatest_first))
        masks[key] = LocationMask(bit_mask(ranks, run.world_size))
        for rank in (group[0] for group in found if group[0]):
            wanted.setdefault(rank, []).append(key)
    names = NameMasks()
    with run.open(0, until=max(groups)[0]) as reference:
        for rank, keys in sorted(wanted.items()):
            with run.open(rank, until=keys[-1][0]) as trace:
                pair = Pair(reference, trace, SHARED_PHASES, keep)
                for step, phase in keys:
                    differing, compared = pair.differing_names(step, PHASES[phase])
                    name_masks = names.mask(phase, differing), names.cached_mask(phase, compared)
                    masks[step, phase] = masks[step, phase].union(0, *name_masks)
    return masks


def _greatest_first(ranks: list[int]) -> tuple[int, list[int]]:
    return -len(ranks), ranks


def _outside_majority(groups: list[list[int]]) -> tuple[int, ...]:
    """Ranks outside the strict majority; all ranks without a majority. ``groups`` begin with the greatest."""
    difference = Difference("", tuple((str(index), tuple(ranks)) for index, ranks in enumerate(groups)))
    return difference.suspects or tuple(sorted(rank for ranks in groups for rank in ranks))


def compare_ranks(run: Run, progress: Progress = lambda _: None) -> Comparison:
    """Differences between the ranks of one run, in the phases which ranks share.

    Local gradients, inputs and buffers matching ``local_buffers`` belong to single ranks and are not compared. The
    verdict about a run of one rank is ``unknown``. Every file is read once, and again up to the last difference; two
    files are open at a time. Memory: see :class:`RankDigests`.

    Raises:
        TraceError: a trace file cannot be read.
    """
    if run.world_size == 1:
        return Comparison(
            (str(run.folder),), "unknown", "cannot tell: one rank only, and no other to compare it with; name two runs"
        )
    keep = keep_shared(run.environments[0].local_buffers)
    digests = RankDigests(run, keep, progress)
    keys = digests.differing()
    if keys and not digests.names_agree:  # the order of names is no difference
        digests = RankDigests(run, keep, lambda _: None, by_content=True)
        keys = digests.differing()
    if not keys:
        return _result(run, digests, *_verdict_without_difference(run, digests))
    return _different(run, digests, keys, keep)


def _verdict_without_difference(run: Run, digests: RankDigests) -> tuple[Verdict, str]:
    steps = digests.compared_steps
    if digests.run_coverage.damage:
        agreed = "nothing differs in what can be compared" if steps else "nothing before it to compare"
        return "unknown", f"cannot tell: {run.folder / digests.run_coverage.damage[0][1]}; {agreed}"
    if uncompared := uncompared_steps([digests.run_coverage], steps):
        return "unknown", f"cannot tell: {uncompared}"
    if not steps:
        return "unknown", "cannot tell: no step was recorded by all ranks"
    if not digests.phases:
        return "unknown", "cannot tell: no phase that ranks share was recorded by all of them"
    if _DIVERGENCE_ERROR in digests.run_coverage.reasons:
        return "unknown", (
            f"cannot tell: the run ended by {_DIVERGENCE_ERROR} after step {steps[-1]}; up to there ranks hold the "
            "same, and what parted them came after it (see the error)"
        )
    if steps == [run.environments[0].first_step - 1]:
        return (
            "unknown",
            f"cannot tell: only the start ({format_steps(steps)}) was recorded by all ranks, where they agree",
        )
    number = len(digests.phases)
    return "same", (
        f"same: {run.world_size} ranks hold the same, {format_steps(steps)}, "
        f"{number} phase{'s' * (number > 1)}, {digests.tensors:,} tensors, bit for bit"
    )


def _result(
    run: Run, digests: RankDigests, verdict: Verdict, headline: str, first_step: int | None = None
) -> Comparison:
    """``first_step``: of the first divergence, up to which operations are compared; None without any."""
    steps = digests.compared_steps
    notes = digests.run_coverage.notes()
    if digests.missing:
        notes.append(f"not compared, for not all ranks recorded it: {', '.join(phase_labels(digests.missing))}")
    notes += optimizer_notes([run], digests.run_coverage.phases)
    notes += local_buffer_notes(run.environments[0].local_buffers)
    if verdict == "same":
        notes += [f"{cause.what} differs between ranks and changed no bit" for cause in _causes(run)]
    compared = {k: v for k, v in digests.micro_batches.items() if first_step is None or k <= first_step}
    operations = RankOperations(run, compared)
    return Comparison(
        (str(run.folder),),
        verdict,
        with_operations(headline, verdict, operations.finding),
        (steps[0], steps[-1]) if steps else None,
        operations=operations.finding,
        notes=(*notes, *operations.notes()),
    )


def _different(run: Run, digests: RankDigests, keys: list[Key], keep: Keep) -> Comparison:
    first, *others = read_divergences(run, keys[0], keep)
    masks = read_masks(run, {key: digests.groups(key) for key in keys}, keep)
    locations, more_locations = merge(masks, digests.compared_steps)
    causes = _causes(run)
    is_start = first.step == run.environments[0].first_step - 1
    evidence = Evidence(
        kind="ranks",
        first=first,
        compared=digests.phases,
        is_start=is_start,
        previous=max((step for step in digests.compared_steps if step < first.step), default=None),
        causes=frozenset(cause.what for cause in causes),
    )
    when = f"at the start (step {first.step})" if is_start else f"at step {first.step}"
    headline = (
        f"different: ranks part {when} in {PHASE_LABELS[first.phase]}: {_format_sides(first.sides)}: {first.name}"
    )
    return replace(
        _result(run, digests, "different", headline, first.step),
        first=first,
        others=tuple(others[:MAX_OTHERS]),
        explanation=f"{_format_majority(first, run.world_size)} {explain(evidence)}",
        causes=tuple(causes),
        locations=locations,
        more_locations=more_locations,
    )


def _format_sides(sides: Sequence[Side]) -> str:
    """Labels of the sides, the smallest group of ranks first."""
    labels = [side.label for side in reversed(sides)]
    more = [f"{len(labels) - MAX_SIDES} more groups"] if len(labels) > MAX_SIDES else []
    return " against ".join([*labels[:MAX_SIDES], *more])


def _format_majority(first: Divergence, world_size: int) -> str:
    if len(first.ranks) == world_size:
        return "No majority: nothing tells which ranks to look at."
    agreeing = world_size - len(first.ranks)
    return f"{agreeing} of {world_size} ranks agree; a majority speaks against {name_ranks(first.ranks)}."


def _causes(run: Run) -> list[Cause]:
    """Facts of the environment which differ between ranks; the majority's value comes first."""
    rows = [
        {fact: item.facts[fact] for fact in by_likelihood(list(item.facts)) if fact not in _FACTS_OF_A_RANK}
        for item in run.environments
    ]
    return [
        Cause(item.name, tuple((name_ranks(ranks), value) for value, ranks in item.holders[:MAX_SIDES]))
        for item in compare_rows(rows).differences
    ]
