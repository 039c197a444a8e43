"""Comparison of two runs. Digests decide the verdict; environments, inputs and generators are possible causes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

from legacy_ddp._compare import name_ranks
from legacy_ddp.debug._diff import causes as call_diff
from legacy_ddp.debug._diff import causes as environment_diff
from legacy_ddp.debug._diff import coverage
from legacy_ddp.debug._diff.causes import CallDifferences, metric_differences
from legacy_ddp.debug._diff.compare_ranks import compare_ranks
from legacy_ddp.debug._diff.coverage import ComparisonCoverage, format_steps, uncompared_steps
from legacy_ddp.debug._diff.explain import Evidence, explain
from legacy_ddp.debug._diff.locations import Key, Locations, merge
from legacy_ddp.debug._diff.operations import RunOperations, with_operations
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
)
from legacy_ddp.debug._diff.result import Cause, Comparison, Divergence, Location, MetricDifference, Verdict
from legacy_ddp.debug._trace.read import Progress, RankTrace
from legacy_ddp.debug._trace.records import PHASE_LABELS, PHASES
from legacy_ddp.debug._trace.run import Run, RunCoverage


class RunDifferences:
    """Reads both runs once, two files at a time.

    Runs of equal world sizes: rank r is compared with rank r. Runs of different world sizes: rank 0 is compared with
    rank 0, in the shared phases.
    """

    def __init__(self, a: Run, b: Run, progress: Progress) -> None:
        self.runs = a, b
        self.equal_sizes = a.world_size == b.world_size
        self.calls = CallDifferences()
        self.operations = RunOperations()
        self.run_coverages = RunCoverage("A"), RunCoverage("B")
        self.coverage = ComparisonCoverage()
        self._tensors = Locations()
        self._settings = Locations()
        self.metrics: tuple[MetricDifference, ...] = ()
        for rank in range(a.world_size) if self.equal_sizes else (0,):
            with self.open(rank, progress) as pair:
                self._add_rank(rank, pair)

    @contextmanager
    def open(self, rank: int, progress: Progress = lambda _: None) -> Iterator[Pair]:
        a, b = self.runs
        with a.open(rank, progress) as trace_a, b.open(rank, progress) as trace_b:
            if self.equal_sizes:
                yield Pair(trace_a, trace_b)
            else:
                yield Pair(trace_a, trace_b, SHARED_PHASES, keep_shared(self.local_buffers))

    @property
    def local_buffers(self) -> list[str]:
        """Patterns of buffers with a value of their own on each rank, in either run."""
        return sorted({*chain.from_iterable(run.environments[0].local_buffers for run in self.runs)})

    @property
    def reproducible(self) -> bool:
        """Whether both runs add gradients in an order independent of the number of ranks."""
        environments = chain.from_iterable(run.environments for run in self.runs)
        return all(environment.facts.get("reproducible") == "True" for environment in environments)

    @property
    def any_tensor_differs(self) -> bool:
        """Differing settings alone are a note: they changed no bit."""
        return bool(self._tensors)

    def divergences(self) -> list[Divergence]:
        """The divergences in the first location."""
        return (self._settings if self._settings_come_first else self._tensors).divergences()

    @property
    def size(self) -> float | None:
        """The greatest relative difference of norms in the first location."""
        return None if self._settings_come_first else self._tensors.size

    def locations(self, first: Divergence) -> tuple[tuple[Location, ...], int]:
        """The first few locations from ``first`` on, and the number of others; earlier settings are causes."""
        masks = {**self._tensors.masks, **self._settings.masks}
        start = first.step, PHASES.index(first.phase)
        return merge({key: mask for key, mask in masks.items() if key >= start}, self.coverage.any_steps)

    def environment_causes(self) -> list[Cause]:
        a, b = (run.environments for run in self.runs)
        if self.equal_sizes:
            return environment_diff.causes_by_rank(list(zip(a, b, strict=True)))
        return environment_diff.causes_by_run(a, b)[0]

    def setting_causes(self, until: int | None = None) -> list[Cause]:
        """Differing settings up to a step; only the first step with a difference counts."""
        return [
            Cause(
                item.name, tuple((side.label, side.value or "nothing") for side in item.sides), f"from step {item.step}"
            )
            for item in self._settings.divergences()
            if until is None or item.step <= until
        ]

    def causes(self, until: int) -> list[Cause]:
        """Possible causes of a divergence in step ``until``."""
        settings = [] if self._settings_come_first else self.setting_causes(until)
        around = [*self.environment_causes(), *settings]
        if self.equal_sizes:
            return [*around, *self.calls.causes(until)]
        totals = [call_diff.step_totals(_traces(run, until), until, run.world_size) for run in self.runs]
        return [*around, *call_diff.total_causes(*totals, reproducible=self.reproducible)]

    def _add_rank(self, rank: int, pair: Pair) -> None:
        for run_coverage, trace in zip(self.run_coverages, (pair.a, pair.b), strict=True):
            run_coverage.add(rank, trace)
        check_same_model(pair, *(run.folder for run in self.runs))
        self.coverage.add_rank(rank, pair.steps, pair.entry_counts())
        if rank == 0:
            self.metrics = metric_differences(pair)
        for step, phase in pair.candidates():
            self._compare(rank, pair, step, phase)
        if self.equal_sizes:
            self.calls.add_rank(rank, pair, self._tensors.first_step)
            self.operations.add_rank(rank, pair, self._tensors.first_step)

    def _compare(self, rank: int, pair: Pair, step: int, phase: str) -> None:
        key: Key = step, PHASES.index(phase)
        locations = self._settings if phase == "settings" else self._tensors
        differing, names = pair.differing_names(step, phase)
        if not differing:
            return
        locations.add(key, rank, differing, names)
        if locations.may_be_first(key):
            a, b = pair.entries(step, phase)
            total = total_norm(entry.norm for entry in a.values()) if phase.endswith("gradients") else 0.0
            locations.add_details(key, rank, entry_differences(a, b), total)

    @property
    def _settings_come_first(self) -> bool:
        """Whether settings differ first in the same step as tensors, and before the tensors."""
        settings, tensors = self._settings.first_key, self._tensors.first_key
        return settings is not None and tensors is not None and settings[0] == tensors[0] and settings < tensors


def _traces(run: Run, until: int) -> Iterator[RankTrace]:
    """The trace files of all ranks, one at a time, up to a step."""
    for rank in range(run.world_size):
        with run.open(rank, until=until) as trace:
            yield trace


def compare_runs(a: Run, b: Run, progress: Progress = lambda _: None) -> Comparison:
    """Differences between two runs, in the steps and phases which both recorded.

    Rank r is compared with rank r. Runs of different world sizes are compared in the phases which ranks share: rank 0
    with rank 0, and the ranks of each run with each other. Every file is read once; where lines differ their digests
    are parsed, and whole lines only in the first location. Two files are open at a time. Memory grows with the number
    of steps plus the number of ranks, and for different world sizes with their product (see :class:`RankDigests`).

    Raises:
        TraceError: a trace file cannot be read, or the runs are of different models.
    """
    return _RunComparison(a, b, progress).compare()


class _RunComparison:
    def __init__(self, a: Run, b: Run, progress: Progress) -> None:
        self._a = a
        self._b = b
        self._found = RunDifferences(a, b, progress)
        self._coverage = self._found.coverage
        self._rank_problems: list[str] = []

    def compare(self) -> Comparison:
        if not self._found.equal_sizes:
            self._compare_ranks_of_each()
        if self._found.any_tensor_differs:
            return self._different()
        return self._result(*self._verdict_without_difference())

    def _compare_ranks_of_each(self) -> None:
        """Check that rank 0 stands for all ranks of its run, and in which steps."""
        for label, run in (("A", self._a), ("B", self._b)):
            if run.world_size > 1:
                found = compare_ranks(run)
                self._coverage.add_limit(found.steps)
                if found.verdict != "same":
                    self._rank_problems.append(f"inside {label}: {found.headline}")

    def _verdict_without_difference(self) -> tuple[Verdict, str]:
        steps, run_coverages = self._coverage.steps, self._found.run_coverages
        for run, run_coverage in zip((self._a, self._b), run_coverages, strict=True):
            if run_coverage.damage:
                agreed = "nothing differs in what can be compared" if steps else "nothing before it to compare"
                return "unknown", f"cannot tell: {run.folder / run_coverage.damage[0][1]}; {agreed}"
        if not self._coverage.any_steps:
            spans = " and ".join(
                f"{label} has {run_coverage.span()}" for label, run_coverage in zip("AB", run_coverages, strict=True)
            )
            return "unknown", f"cannot tell: no step in common ({spans})"
        if self._rank_problems:
            return "unknown", f"cannot tell: rank 0 of each run holds the same, but {self._rank_problems[0]}"
        if uncompared := uncompared_steps(run_coverages, steps):
            return "unknown", f"cannot tell: {uncompared}"
        if not steps:
            return "unknown", "cannot tell: no step was compared on every rank"
        if not self._coverage.phases:
            return "unknown", "cannot tell: no phase was recorded by both"
        if all(self._is_start(step) for step in steps):
            return (
                "unknown",
                f"cannot tell: only the start ({format_steps(steps)}) was recorded by both, where they agree",
            )
        return "same", f"same: {self._ranks}, {format_steps(steps)}, {self._amount}, bit for bit"

    @property
    def _ranks(self) -> str:
        if not self._found.equal_sizes:
            return f"what ranks of {self._a.world_size} and of {self._b.world_size} share"
        return f"{self._a.world_size} rank{'s' * (self._a.world_size > 1)}"

    @property
    def _amount(self) -> str:
        phases, tensors = len(self._coverage.phases), self._coverage.tensors
        return f"{phases} phase{'s' * (phases > 1)}, {tensors:,} tensor{'s' * (tensors != 1)}"

    def _different(self) -> Comparison:
        first, *others = self._found.divergences()
        causes = self._found.causes(first.step)
        locations, more_locations = self._found.locations(first)
        return replace(
            self._result("different", self._headline(first), first),
            first=first,
            others=tuple(others),
            size=self._found.size,
            explanation=explain(self._evidence(first, causes)),
            causes=tuple(causes),
            locations=locations,
            more_locations=more_locations,
        )

    def _headline(self, first: Divergence) -> str:
        where = f" of {name_ranks(first.ranks)}" if self._found.equal_sizes else ""
        when = f"at the start (step {first.step})" if self._is_start(first.step) else f"at step {first.step}"
        return f"different: runs part {when} in {PHASE_LABELS[first.phase]}{where}: {first.name}"

    def _is_start(self, step: int) -> bool:
        return bool(self._starting_runs(step))

    def _starting_runs(self, step: int) -> list[str]:
        """Labels of the runs which start with the state after ``step``."""
        return [label for label, run in (("A", self._a), ("B", self._b)) if step == run.environments[0].first_step - 1]

    def _evidence(self, first: Divergence, causes: list[Cause]) -> Evidence:
        found, starting = self._found, self._starting_runs(first.step)
        return Evidence(
            kind="runs" if found.equal_sizes else "sizes",
            first=first,
            compared=self._coverage.phases,
            is_start=bool(starting),
            starting_run=starting[0] if len(starting) == 1 else "",
            previous=max((step for step in self._coverage.any_steps if step < first.step), default=None),
            causes=frozenset(cause.what for cause in causes),
            inputs_known=all(found.calls.inputs_known(rank) for rank in first.ranks),
            reproducible=found.reproducible,
            generators_known=all(found.calls.call_known(rank) for rank in first.ranks),
            size=found.size,
            growth=self._growth(first) if found.size is not None and found.size <= ROUNDING_LIMIT else None,
        )

    def _growth(self, first: Divergence) -> Growth:
        """Growth of the difference on one rank. Reads the files of the rank again."""
        with self._found.open(first.ranks[0]) as pair:
            return find_growth(pair, first.step)

    def _result(self, verdict: Verdict, headline: str, first: Divergence | None = None) -> Comparison:
        compared = self._coverage.steps
        steps = (compared[0], compared[-1]) if compared else None
        folders = str(self._a.folder), str(self._b.folder)
        operations = self._found.operations.finding(first)
        return Comparison(
            folders,
            verdict,
            with_operations(headline, verdict, operations),
            steps,
            metrics=self._found.metrics,
            operations=operations,
            notes=(*self._notes(verdict), *self._found.operations.notes(first)),
        )

    def _notes(self, verdict: Verdict) -> list[str]:
        found, steps = self._found, self._coverage.any_steps
        texts = coverage.step_notes(found.runs, found.run_coverages, steps) + self._coverage.notes()
        if not found.equal_sizes:
            texts += coverage.world_size_notes(
                found.runs,
                found.local_buffers,
                inputs_compared=found.reproducible,
                has_operations=any(run_coverage.operations.steps for run_coverage in found.run_coverages),
            )
        if steps:
            phases = PHASES if found.equal_sizes else SHARED_PHASES
            texts += coverage.phase_notes(found.runs, found.run_coverages, phases)
        if self._a.folder.resolve() == self._b.folder.resolve():
            texts.append("A and B are the same folder")
        texts += self._rank_problems
        if verdict == "same":
            texts += coverage.cause_notes([*found.environment_causes(), *found.setting_causes()])
        return texts
