"""Differences between two runs, collected rank by rank from their trace files."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from legacy_ddp.debug._diff import call_diff, environment_diff
from legacy_ddp.debug._diff.call_diff import CallDifferences
from legacy_ddp.debug._diff.coverage import ComparisonCoverage
from legacy_ddp.debug._diff.locations import Key, Locations, merge
from legacy_ddp.debug._diff.metric_diff import metric_differences
from legacy_ddp.debug._diff.operation_runs import RunOperations
from legacy_ddp.debug._diff.pair import Pair
from legacy_ddp.debug._diff.result import Cause, Divergence, Location, MetricDifference
from legacy_ddp.debug._diff.same_model import check_same_model
from legacy_ddp.debug._diff.sections import SHARED_PHASES, entry_differences, keep_shared, total_norm
from legacy_ddp.debug._trace.read import Progress, RankTrace
from legacy_ddp.debug._trace.records import PHASES
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
