"""Comparison of two runs, or of the ranks of one run, in pairs of files. Digests decide the verdict.

Two runs: rank r of A with rank r of B. The ranks of one run: rank 0 with every other rank; a majority is named, but not
called right.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

from legacy_ddp._compare import MAX_SIDES, compare_rows, name_ranks
from legacy_ddp.debug._diff import causes, coverage
from legacy_ddp.debug._diff.explain import Evidence, Kind, explain
from legacy_ddp.debug._diff.locations import (
    MAX_OTHERS,
    Key,
    LocationMask,
    Locations,
    RankGroups,
    bit_mask,
    merge,
    read_divergences,
)
from legacy_ddp.debug._diff.operations import RankOperations, RunOperations, with_operations
from legacy_ddp.debug._diff.pair import (
    ROUNDING_LIMIT,
    SHARED_PHASES,
    Growth,
    Pair,
    check_same_model,
    entry_differences,
    find_growth,
    keep_shared,
    total_norm,
    unfinished_step,
)
from legacy_ddp.debug._diff.result import Cause, Comparison, Divergence, MetricDifference, OperationFinding, Verdict
from legacy_ddp.debug._trace.read import Progress, RankTrace
from legacy_ddp.debug._trace.records import PHASE_LABELS, PHASES
from legacy_ddp.debug._trace.run import Run, RunCoverage

_DIVERGENCE_ERROR = "ReplicaDivergenceError"
# Expected to differ between ranks.
_FACTS_OF_A_RANK = (*causes.EXCLUDED, "seed", "devices")


def compare_runs(a: Run, b: Run, progress: Progress = lambda _: None) -> Comparison:
    """Differences between two runs, in the steps and phases which both recorded.

    Rank r is compared with rank r. Runs of different world sizes are compared in the phases which ranks share: rank 0
    with rank 0, and the ranks of each run with each other. Every file is read once; where lines differ their digests
    are parsed, and whole lines only in the first location. Two files are open at a time. Memory grows with the number
    of steps plus the number of ranks, and for different world sizes with the differences between the ranks of a run
    (see :func:`compare_ranks`).

    Raises:
        TraceError: a trace file cannot be read, or the runs are of different models.
    """
    return _RunComparison(a, b, progress).result()


def compare_ranks(run: Run, progress: Progress = lambda _: None) -> Comparison:
    """Differences between the ranks of one run, in the phases which ranks share.

    Local gradients, inputs and buffers matching ``local_buffers`` belong to single ranks and are not compared. The
    verdict about a run of one rank is ``unknown``. Every file is read once, and again up to the first difference; two
    files are open at a time. Memory: 16 bytes per rank for each step and phase with a difference.

    Raises:
        TraceError: a trace file cannot be read.
    """
    if run.world_size == 1:
        headline = "cannot tell: one rank only, and no other to compare it with; name two runs"
        return Comparison((str(run.folder),), "unknown", headline)
    return _RankComparison(run, progress).result()


class _Comparison(ABC):
    """The differences between pairs of files, and the result.

    ``coverage``: what was compared. ``run_coverages``: what each run recorded. A subclass fills both, and says how a
    difference is told. ``noun``: of the compared sides. ``no_step``, ``no_phase``, ``everyone``: for headlines.
    """

    noun: ClassVar[str]
    no_step: ClassVar[str]
    no_phase: ClassVar[str]
    everyone: ClassVar[str]

    def __init__(self, runs: Sequence[Run], labels: Sequence[str]) -> None:
        self.runs = tuple(runs)
        self.run_coverages = tuple(map(RunCoverage, labels))
        self.coverage = coverage.ComparisonCoverage()
        self.problems: list[str] = []
        self.metrics: tuple[MetricDifference, ...] = ()

    def result(self) -> Comparison:
        if divergences := self.divergences():
            return self._different(*divergences)
        if doubt := next(filter(None, self._doubts()), ""):
            return self._result("unknown", f"cannot tell: {doubt}")
        phases, tensors, steps = len(self.coverage.phases), self.coverage.tensors, self.coverage.steps
        counts = f"{phases} phase{'s' * (phases > 1)}, {tensors:,} tensor{'s' * (tensors != 1)}"
        return self._result("same", f"same: {self.sides()}, {coverage.format_steps(steps)}, {counts}, bit for bit")

    @abstractmethod
    def divergences(self) -> list[Divergence]:
        """The divergences in the first location."""

    @abstractmethod
    def masks(self) -> Mapping[Key, LocationMask]:
        """All locations."""

    @property
    @abstractmethod
    def steps(self) -> Sequence[int]:
        """The steps in which a difference counts, ascending."""

    @abstractmethod
    def possible_causes(self, until: int) -> list[Cause]:
        """Possible causes of a divergence in step ``until``."""

    @abstractmethod
    def evidence(self, first: Divergence) -> Mapping[str, Any]:
        """Fields of :class:`Evidence` beyond those that both comparisons have."""

    @abstractmethod
    def operations(self, first: Divergence | None) -> tuple[OperationFinding | None, Iterator[str]]:
        """The comparison of recorded operations, and notes about it."""

    @abstractmethod
    def notes(self, verdict: Verdict) -> list[str]:
        """Parts of the traces without a comparison, with the reason."""

    @abstractmethod
    def sides(self) -> str:
        """The equal sides, for the headline."""

    @abstractmethod
    def where(self, first: Divergence) -> str:
        """The ranks of a divergence, for the headline."""

    def size(self) -> float | None:
        """The greatest relative difference of norms in the first location; None if unknown."""
        return None

    def _doubts(self) -> Iterator[str]:
        """The reasons not to say ``same`` although nothing differs, the weightiest first; empty texts are none."""
        steps = self.coverage.steps
        for run, run_coverage in zip(self.runs, self.run_coverages, strict=True):
            if run_coverage.damage:
                agreed = "nothing differs in what can be compared" if steps else "nothing before it to compare"
                yield f"{run.folder / run_coverage.damage[0][1]}; {agreed}"
        if len(self.runs) > 1 and not self.coverage.any_steps:
            spans = " and ".join(f"{item.label} has {item.span()}" for item in self.run_coverages)
            yield f"no step in common ({spans})"
        if self.problems:
            yield f"rank 0 of each run holds the same, but {self.problems[0]}"
        yield coverage.uncompared_steps(self.run_coverages, steps)
        if not steps:
            yield self.no_step
        if not self.coverage.phases:
            yield self.no_phase
        if len(self.runs) == 1 and _DIVERGENCE_ERROR in self.run_coverages[0].reasons:
            yield (
                f"the run ended by {_DIVERGENCE_ERROR} after step {steps[-1]}; all ranks agree up to there, and the "
                "error shows what differed next"
            )
        if all(self._starting_runs(step) for step in steps):
            yield f"only the start ({coverage.format_steps(steps)}) was recorded by {self.everyone}, where they agree"

    def _different(self, first: Divergence, *others: Divergence) -> Comparison:
        found = self.possible_causes(first.step)
        start: Key = first.step, PHASES.index(first.phase)
        later = {key: mask for key, mask in self.masks().items() if key >= start}  # earlier settings are causes
        locations, more_locations = merge(later, self.steps)
        starting = self._starting_runs(first.step)
        evidence = Evidence(
            first=first,
            compared=self.coverage.phases,
            is_start=bool(starting),
            starting_run=starting[0] if len(starting) == 1 else "",
            previous=max((step for step in self.steps if step < first.step), default=None),
            causes=frozenset(cause.what for cause in found),
            size=self.size(),
            **self.evidence(first),
        )
        when = f"at the start (step {first.step})" if starting else f"at step {first.step}"
        return self._result(
            "different",
            f"different: {self.noun} part {when} in {PHASE_LABELS[first.phase]}{self.where(first)}: {first.name}",
            first,
            others=others[:MAX_OTHERS],
            size=evidence.size,
            explanation=explain(evidence),
            causes=tuple(found),
            locations=locations,
            more_locations=more_locations,
        )

    def _starting_runs(self, step: int) -> list[str]:
        """Labels of the runs which start with the state after ``step``."""
        pairs = zip(self.run_coverages, self.runs, strict=True)
        return [item.label for item, run in pairs if step == run.environments[0].first_step - 1]

    def _result(self, verdict: Verdict, headline: str, first: Divergence | None = None, **more: Any) -> Comparison:
        compared = self.coverage.steps
        operations, notes = self.operations(first)
        return Comparison(
            tuple(str(run.folder) for run in self.runs),
            verdict,
            with_operations(headline, verdict, operations),
            (compared[0], compared[-1]) if compared else None,
            first=first,
            metrics=self.metrics,
            operations=operations,
            notes=(*self.notes(verdict), *notes),
            **more,
        )


class _RunComparison(_Comparison):
    """Two runs. With different world sizes, rank 0 stands for each run, in the shared phases."""

    noun, everyone = "runs", "both"
    no_step, no_phase = "no step was compared on every rank", "no phase was recorded by both"

    def __init__(self, a: Run, b: Run, progress: Progress) -> None:
        super().__init__((a, b), "AB")
        self._equal_sizes = a.world_size == b.world_size
        self._calls = causes.CallDifferences()
        self._operations = RunOperations()
        self._tensors = Locations()
        self._settings = Locations()
        for rank in range(a.world_size) if self._equal_sizes else (0,):
            with self._open(rank, progress) as pair:
                self._add_rank(rank, pair)
        if not self._equal_sizes:
            self._compare_ranks_of_each()

    @contextmanager
    def _open(self, rank: int, progress: Progress = lambda _: None) -> Iterator[Pair]:
        a, b = self.runs
        with a.open(rank, progress) as trace_a, b.open(rank, progress) as trace_b:
            if self._equal_sizes:
                yield Pair(trace_a, trace_b)
            else:
                yield Pair(trace_a, trace_b, SHARED_PHASES, keep_shared(self._local_buffers))

    def _add_rank(self, rank: int, pair: Pair) -> None:
        for run_coverage, trace in zip(self.run_coverages, (pair.a, pair.b), strict=True):
            run_coverage.add(rank, trace)
        check_same_model(pair, *(run.folder for run in self.runs))
        self.coverage.add_rank(rank, pair.steps, pair.entry_counts())
        if rank == 0:
            self.metrics = causes.metric_differences(pair)
        for step, phase in pair.candidates:
            self._compare(rank, pair, step, phase)
        if self._equal_sizes:
            self._calls.add_rank(rank, pair, self._tensors.first_step)
            self._operations.add_rank(rank, pair, self._tensors.first_step)

    def _compare(self, rank: int, pair: Pair, step: int, phase: str) -> None:
        key: Key = step, PHASES.index(phase)
        locations = self._settings if phase == "settings" else self._tensors
        differing, names = pair.differing(step, phase)
        if not differing:
            return
        locations.add(key, rank, differing, names)
        if locations.may_be_first(key):
            a, b = pair.entries(step, phase)
            total = total_norm(entry.norm for entry in a.values()) if phase.endswith("gradients") else 0.0
            locations.add_details(key, rank, entry_differences(a, b), total)

    def _compare_ranks_of_each(self) -> None:
        """Check that rank 0 stands for all ranks of its run, and in which steps."""
        for label, run in zip("AB", self.runs, strict=True):
            if run.world_size > 1:
                found = compare_ranks(run)
                self.coverage.add_limit(found.steps)
                if found.verdict != "same":
                    self.problems.append(f"inside {label}: {found.headline}")

    @property
    def _local_buffers(self) -> list[str]:
        """Patterns of buffers with a value of their own on each rank, in either run."""
        return sorted({*chain.from_iterable(run.environments[0].local_buffers for run in self.runs)})

    @property
    def _reproducible(self) -> bool:
        """Whether both runs add gradients in an order independent of the number of ranks."""
        environments = chain.from_iterable(run.environments for run in self.runs)
        return all(environment.facts.get("reproducible") == "True" for environment in environments)

    @property
    def _settings_come_first(self) -> bool:
        """Whether settings differ first in the same step as tensors, and before the tensors."""
        settings, tensors = self._settings.first_key, self._tensors.first_key
        return settings is not None and tensors is not None and settings[0] == tensors[0] and settings < tensors

    @property
    def steps(self) -> Sequence[int]:
        return self.coverage.any_steps

    def divergences(self) -> list[Divergence]:
        """If only settings differ, there is no divergence but a note: they changed no bit."""
        return (self._settings if self._settings_come_first else self._tensors).divergences()

    def size(self) -> float | None:
        return None if self._settings_come_first else self._tensors.size

    def masks(self) -> Mapping[Key, LocationMask]:
        return {**self._tensors.masks, **self._settings.masks}

    def possible_causes(self, until: int) -> list[Cause]:
        settings = [] if self._settings_come_first else self._setting_causes(until)
        around = [*self._environment_causes(), *settings]
        if self._equal_sizes:
            return [*around, *self._calls.causes(until)]
        totals = [causes.step_totals(_traces(run, until), until, run.world_size) for run in self.runs]
        return [*around, *causes.total_causes(*totals, reproducible=self._reproducible)]

    def _environment_causes(self) -> list[Cause]:
        a, b = (run.environments for run in self.runs)
        if self._equal_sizes:
            return causes.causes_by_rank(list(zip(a, b, strict=True)))
        return causes.causes_by_run(a, b)[0]

    def _setting_causes(self, until: int | None = None) -> list[Cause]:
        """Differing settings up to a step; only the first step with a difference counts."""
        return [
            Cause(
                item.name, tuple((side.label, side.value or "nothing") for side in item.sides), f"from step {item.step}"
            )
            for item in self._settings.divergences()
            if until is None or item.step <= until
        ]

    def evidence(self, first: Divergence) -> Mapping[str, Any]:
        kind: Kind = "runs" if self._equal_sizes else "sizes"
        size = self.size()
        return {
            "kind": kind,
            "inputs_known": all(self._calls.inputs_known(rank) for rank in first.ranks),
            "generators_known": all(self._calls.call_known(rank) for rank in first.ranks),
            "reproducible": self._reproducible,
            "growth": self._growth(first) if size is not None and size <= ROUNDING_LIMIT else None,
        }

    def _growth(self, first: Divergence) -> Growth:
        """Growth of the difference on one rank. Reads the files of the rank again."""
        with self._open(first.ranks[0]) as pair:
            return find_growth(pair, first.step)

    def operations(self, first: Divergence | None) -> tuple[OperationFinding | None, Iterator[str]]:
        return self._operations.finding(first), self._operations.notes(first)

    def notes(self, verdict: Verdict) -> list[str]:
        steps = self.coverage.any_steps
        texts = coverage.step_notes(self.runs, self.run_coverages, steps) + self.coverage.notes()
        if not self._equal_sizes:
            texts += coverage.world_size_notes(
                self.runs,
                self._local_buffers,
                inputs_compared=self._reproducible,
                has_operations=any(run_coverage.operations.steps for run_coverage in self.run_coverages),
            )
        if steps:
            phases = PHASES if self._equal_sizes else SHARED_PHASES
            texts += coverage.phase_notes(self.runs, self.run_coverages, phases)
        a, b = (run.folder.resolve() for run in self.runs)
        texts += ["A and B are the same folder"] * (a == b) + self.problems
        if verdict == "same":
            texts += coverage.cause_notes([*self._environment_causes(), *self._setting_causes()])
        return texts

    def sides(self) -> str:
        a, b = (run.world_size for run in self.runs)
        return _ranks(a) if a == b else f"what runs of {_ranks(a)} and of {_ranks(b)} have in common"

    def where(self, first: Divergence) -> str:
        return f" of {name_ranks(first.ranks)}" if self._equal_sizes else ""


class _RankComparison(_Comparison):
    """The ranks of one run, each compared with rank 0, in the shared phases."""

    noun, everyone = "ranks", "all ranks"
    no_step = "no step was recorded by all ranks"
    no_phase = "no phase that ranks share was recorded by all of them"

    def __init__(self, run: Run, progress: Progress) -> None:
        super().__init__((run,), ("",))
        self._run = run
        self._keep = keep_shared(run.environments[0].local_buffers)
        self._locations = Locations()
        self._groups: dict[Key, RankGroups] = {}
        self._unfinished: set[tuple[int, str]] = set()
        self._micro_batches: dict[int, list[int]] = {}
        with run.open(0, progress) as reference:
            self._micro_batches = {step: [] for step in reference.micro_batches}
            self._add_rank(0, reference, reference)
            for rank in range(1, run.world_size):
                with run.open(rank, progress) as trace:
                    self._add_rank(rank, reference, trace)
        self.coverage.leave_out(self._unfinished)

    def _add_rank(self, rank: int, reference: RankTrace, trace: RankTrace) -> None:
        pair = Pair(reference, trace, SHARED_PHASES, self._keep, may_lack=())
        self.run_coverages[0].add(rank, trace)
        self.coverage.add_rank(rank, pair.steps, pair.entry_counts())
        last = unfinished_step(trace)
        if last is not None:
            self._unfinished.update((last, phase) for phase in SHARED_PHASES if trace.digest(last, phase) is None)
        self._micro_batches = {
            step: [*numbers, trace.micro_batches[step]]
            for step, numbers in self._micro_batches.items()
            if step in trace.micro_batches
        }
        for step, phase in pair.candidates:
            self._compare(rank, pair, step, phase)

    def _compare(self, rank: int, pair: Pair, step: int, phase: str) -> None:
        """Add the rank to the ranks with equal contents. The lines of one rank in each group are parsed."""
        key: Key = step, PHASES.index(phase)
        if key not in self._groups:
            self._groups[key] = RankGroups(self._run.world_size, pair.a.digest(step, phase))
        groups = self._groups[key]
        if not groups.add_known(rank, pair.b.digest(step, phase)):
            differing, names = pair.differing(step, phase)
            groups.add(rank, differing)
            if differing:
                self._locations.add(key, rank, differing, names)

    def _keys(self) -> list[Key]:
        """The locations with a difference, in the order of training."""
        steps, phases = {*self.steps}, self.coverage.phases
        return sorted(
            (step, phase)
            for step, phase in self._locations.masks
            if step in steps and PHASES[phase] in phases and (step, PHASES[phase]) not in self._unfinished
        )

    @property
    def steps(self) -> Sequence[int]:
        return self.coverage.steps

    def divergences(self) -> list[Divergence]:
        """Read from the files again, one at a time."""
        keys = self._keys()
        return read_divergences(self._run, keys[0], self._keep) if keys else []

    def masks(self) -> Mapping[Key, LocationMask]:
        size, found = self._run.world_size, self._locations.masks
        outside = {key: self._groups[key].outside_majority() for key in self._keys()}
        return {key: replace(found[key], ranks=bit_mask(ranks, size)) for key, ranks in outside.items()}

    def possible_causes(self, until: int) -> list[Cause]:  # noqa: ARG002 - environments are equal in all steps
        """Facts of the environment which differ between ranks; the majority's value comes first."""
        rows = [
            {fact: item.facts[fact] for fact in causes.by_likelihood(list(item.facts)) if fact not in _FACTS_OF_A_RANK}
            for item in self._run.environments
        ]
        return [
            Cause(item.name, tuple((name_ranks(ranks), value) for value, ranks in item.holders[:MAX_SIDES]))
            for item in compare_rows(rows).differences
        ]

    def evidence(self, first: Divergence) -> Mapping[str, Any]:  # noqa: ARG002
        return {"kind": "ranks", "world_size": self._run.world_size}

    def operations(self, first: Divergence | None) -> tuple[OperationFinding | None, Iterator[str]]:
        """Compare the operations of all steps up to ``first``. Reads every trace file a second time."""
        compared = {k: v for k, v in self._micro_batches.items() if first is None or k <= first.step}
        found = RankOperations(self._run, compared)
        return found.finding, found.notes()

    def notes(self, verdict: Verdict) -> list[str]:
        run_coverage, size = self.run_coverages[0], self._run.world_size
        texts = run_coverage.notes()
        if missing := [phase for phase in SHARED_PHASES if 0 < len(run_coverage.phases.get(phase, ())) < size]:
            texts.append(
                f"not compared, because not all ranks recorded it: {', '.join(coverage.phase_labels(missing))}"
            )
        texts += coverage.optimizer_notes([self._run], run_coverage.phases)
        texts += coverage.local_buffer_notes(self._run.environments[0].local_buffers)
        if verdict == "same":
            texts += [f"{cause.what} differs between ranks and changed no bit" for cause in self.possible_causes(0)]
        return texts

    def sides(self) -> str:
        return f"{self._run.world_size} ranks hold the same"

    def where(self, first: Divergence) -> str:
        """The smallest group of ranks first."""
        labels = [side.label for side in reversed(first.sides)]
        more = [f"{len(labels) - MAX_SIDES} more groups"] if len(labels) > MAX_SIDES else []
        return f": {' against '.join([*labels[:MAX_SIDES], *more])}"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


def _traces(run: Run, until: int) -> Iterator[RankTrace]:
    """The trace files of all ranks, one at a time, up to a step."""
    for rank in range(run.world_size):
        with run.open(rank, until=until) as trace:
            yield trace
