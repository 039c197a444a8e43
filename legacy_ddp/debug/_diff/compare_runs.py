"""Comparison of two runs. Digests decide the verdict; environments, inputs and generators are possible causes."""

from dataclasses import replace

from legacy_ddp._compare import name_ranks
from legacy_ddp.debug._diff import notes
from legacy_ddp.debug._diff.compare_ranks import compare_ranks
from legacy_ddp.debug._diff.coverage import format_steps, uncompared_steps
from legacy_ddp.debug._diff.evidence import Evidence
from legacy_ddp.debug._diff.explain import explain
from legacy_ddp.debug._diff.growth import ROUNDING_LIMIT, Growth, find_growth
from legacy_ddp.debug._diff.operation_finding import with_operations
from legacy_ddp.debug._diff.result import Cause, Comparison, Divergence, Verdict
from legacy_ddp.debug._diff.run_differences import RunDifferences
from legacy_ddp.debug._diff.sections import SHARED_PHASES
from legacy_ddp.debug._trace.read import Progress
from legacy_ddp.debug._trace.records import PHASE_LABELS, PHASES
from legacy_ddp.debug._trace.run import Run


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
        texts = notes.step_notes(found.runs, found.run_coverages, steps) + self._coverage.notes()
        if not found.equal_sizes:
            texts += notes.world_size_notes(
                found.runs,
                found.local_buffers,
                inputs_compared=found.reproducible,
                has_operations=any(run_coverage.operations.steps for run_coverage in found.run_coverages),
            )
        if steps:
            phases = PHASES if found.equal_sizes else SHARED_PHASES
            texts += notes.phase_notes(found.runs, found.run_coverages, phases)
        if self._a.folder.resolve() == self._b.folder.resolve():
            texts.append("A and B are the same folder")
        texts += self._rank_problems
        if verdict == "same":
            texts += notes.cause_notes([*found.environment_causes(), *found.setting_causes()])
        return texts
