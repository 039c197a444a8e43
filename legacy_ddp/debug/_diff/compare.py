"""Comparison of two runs, or of the ranks of one run, by digests.

Pairs of files are compared: rank r of A with rank r of B, or rank 0 of a run with every other rank. Files that differ
are read a second time, up to the first difference.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import Any

from legacy_ddp._text import MAX_SIDES, compare_rows, first_few, name_ranks
from legacy_ddp.debug._diff import causes, verdict
from legacy_ddp.debug._diff.causes import (
    SettingDifferences,
    cause_of_ranks,
    cause_of_runs,
    explaining,
    is_apart,
)
from legacy_ddp.debug._diff.evidence import Kind
from legacy_ddp.debug._diff.operations import RunOperations
from legacy_ddp.debug._diff.pair import (
    SETTINGS,
    SHARED_PHASES,
    Differing,
    EntryPair,
    Key,
    Locations,
    Pair,
    RankGroups,
    check_same_model,
    divergences_of_ranks,
    divergences_of_runs,
    find_growth,
    first_of_tensors,
    keep_shared,
    unfinished_step,
)
from legacy_ddp.debug._diff.result import (
    ROUNDING_LIMIT,
    Cause,
    Comparison,
    Divergence,
    MetricDifference,
)
from legacy_ddp.debug._diff.verdict import Found, Words, find_verdict
from legacy_ddp.debug._trace.read import RankTrace, Run, RunCoverage
from legacy_ddp.debug._trace.records import PHASES

_NO_OPERATIONS = (
    "operations are compared between two runs, and not between the ranks of one, which have batches of their own: "
    "cross_check() lets every rank compute the same batch"
)
# Expected to differ between ranks.
_FACTS_OF_A_RANK = (*causes.EXCLUDED, "seed", "devices")


def compare_runs(a: Run, b: Run) -> Comparison:
    """Differences between two runs, in the steps and phases that both recorded.

    Rank r is compared with rank r. If the world sizes differ, only the phases that ranks share are compared: rank 0
    with rank 0, and the ranks of each run with each other. Every file is read once; the files of differing ranks are
    read again up to the first different tensors. Two files are open at a time. Memory grows with the number of steps
    plus the number of ranks, and for different world sizes as in :func:`compare_ranks`.
    """
    return find_verdict(_RunPairs(a, b).found())


def compare_ranks(run: Run) -> Comparison:
    """Differences between the ranks of one run, in the phases that ranks share.

    Local gradients, inputs and buffers matching ``local_buffers`` belong to single ranks and are not compared. A
    majority is named, but not called right. The verdict about a run of one rank is ``unknown``. Every file is read
    once, and again up to the first difference; two files are open at a time. Memory: 16 bytes per different rank for
    each step and phase with a difference.
    """
    if run.world_size == 1:
        headline = "cannot tell: one rank only, and no other to compare it with; name two runs"
        return Comparison((str(run.folder),), "unknown", headline)
    return find_verdict(_RankPairs(run).found())


class _RunPairs:
    """Rank r of A and rank r of B. If the world sizes differ: rank 0 of A and of B, in the phases that ranks share."""

    _words = Words("runs", "both", "no step was compared on every rank", "no phase was recorded by both")

    def __init__(self, a: Run, b: Run) -> None:
        self._runs = a, b
        self._recorded = RunCoverage("A"), RunCoverage("B")
        self._compared = verdict.ComparisonCoverage()
        self._has_equal_sizes = a.world_size == b.world_size
        # Patterns of buffers with a value of their own on each rank, in either run.
        self._local_buffers = sorted({*a.environments[0].local_buffers, *b.environments[0].local_buffers})
        self._calls, self._operations = causes.CallDifferences(), RunOperations()
        self._locations = Locations()
        self._other_settings: list[int] = []  # ranks
        self._metrics: tuple[MetricDifference, ...] = ()
        for rank in range(a.world_size) if self._has_equal_sizes else (0,):
            with self._open(rank) as pair:
                self._add(rank, pair)

    @contextmanager
    def _open(self, rank: int, until: int | None = None) -> Iterator[Pair]:
        a, b = self._runs
        with a.open(rank, until) as trace_a, b.open(rank, until) as trace_b:
            if self._has_equal_sizes:
                yield Pair(trace_a, trace_b)
            else:
                yield Pair(trace_a, trace_b, SHARED_PHASES, keep_shared(self._local_buffers))

    def _add(self, rank: int, pair: Pair) -> None:
        for recorded, trace in zip(self._recorded, (pair.a, pair.b), strict=True):
            recorded.add(rank, trace)
        check_same_model(pair, *(run.folder for run in self._runs))
        self._compared.add_rank(rank, pair.steps, pair.entry_counts())
        if rank == 0:
            self._metrics = causes.metric_differences(pair)
        for step, phase in pair.candidates:
            differing, names = pair.differing(step, phase)
            if differing:
                self._locations.add((step, PHASES.index(phase)), rank, differing, names)
        if SettingDifferences.has_any(pair):
            self._other_settings.append(rank)
        if self._has_equal_sizes:
            first = first_of_tensors(self._locations.found)
            self._calls.add_rank(rank, pair, first and first[0])
            self._operations.add_rank(rank, pair, first and first[0])

    def found(self) -> Found:
        problems = [] if self._has_equal_sizes else [*self._compare_ranks_of_each()]
        tensors = first_of_tensors(self._locations.found)
        # If only settings differ, there is no divergence but a note: they changed no bit.
        divergences, size = self._read(tensors)
        settings = _compare_settings(self._compared.any_steps, tensors, self._runs, self._other_settings, self._open)
        if tensors and tensors[1] > SETTINGS:
            ranks = self._locations.found[tensors].ranks
            if of_settings := explaining(tensors[0], ranks, settings.settings):
                divergences, size = of_settings, None
        first = divergences[0] if divergences else None
        around = self._environment_causes()
        world_sizes = [run.world_size for run in self._runs]
        equal = f"what runs of {' and of '.join(map(_ranks, world_sizes))} have in common"
        return Found(
            words=self._words,
            runs=self._runs,
            recorded=self._recorded,
            compared=self._compared,
            steps=self._compared.any_steps,
            locations=self._locations.found,
            divergences=divergences,
            settings=settings,
            cause_of=partial(cause_of_runs, ranks=self._compared.ranks),
            around=around,
            calls=self._call_causes(first.step) if first else (),
            evidence=self._evidence(first, size) if first else {},
            operations=self._operations.finding(first),
            notes=self._notes(problems),
            notes_if_same=verdict.cause_notes(around),
            notes_about_operations=self._operations.notes(first),
            equal=_ranks(world_sizes[0]) if self._has_equal_sizes else equal,
            where=f" of {name_ranks(first.ranks)}" if first and self._has_equal_sizes else "",
            problems=problems,
            metrics=self._metrics,
        )

    def _read(self, key: Key | None) -> tuple[list[Divergence], float | None]:
        """The divergences in a location, and the greatest relative difference of norms there. Reads files again."""
        if key is None:
            return [], None
        step, phase = key[0], PHASES[key[1]]
        ranks = self._locations.found[key].ranks

        def entries() -> Iterator[EntryPair]:
            for rank in ranks:
                with self._open(rank, until=step) as pair:
                    yield pair.entries(step, phase)

        return divergences_of_runs(step, phase, ranks, entries())

    def _compare_ranks_of_each(self) -> Iterator[str]:
        """Check that rank 0 stands for all ranks of its run, and in which steps; yields the reasons against it."""
        for label, run in zip("AB", self._runs, strict=True):
            if run.world_size > 1:
                found = compare_ranks(run)
                self._compared.add_limit(found.steps)
                if found.verdict != "same":
                    yield f"inside {label}: {found.headline}"

    @property
    def _is_reproducible(self) -> bool:
        """Whether both runs add gradients in an order independent of the number of ranks."""
        environments = chain.from_iterable(run.environments for run in self._runs)
        return all(environment.facts.get("reproducible") == "True" for environment in environments)

    def _environment_causes(self) -> list[Cause]:
        a, b = (run.environments for run in self._runs)
        if self._has_equal_sizes:
            return causes.causes_by_rank(list(zip(a, b, strict=True)))
        return causes.causes_by_run(a, b)[0]

    def _call_causes(self, until: int) -> list[Cause]:
        if self._has_equal_sizes:
            return self._calls.causes(until)
        totals = [causes.step_totals(_traces(run, until), until, run.world_size) for run in self._runs]
        return causes.total_causes(*totals, reproducible=self._is_reproducible)

    def _evidence(self, first: Divergence, size: float | None) -> Mapping[str, Any]:
        kind: Kind = "runs" if self._has_equal_sizes else "sizes"
        growth = None
        if size is not None and size <= ROUNDING_LIMIT:
            with self._open(first.ranks[0]) as pair:
                growth = find_growth(pair, first.step)
        return {
            "kind": kind,
            "inputs_known": all(map(self._calls.inputs_known, first.ranks)),
            "generators_known": all(map(self._calls.call_known, first.ranks)),
            "reproducible": self._is_reproducible,
            "size": size,
            "growth": growth,
        }

    def _notes(self, problems: Sequence[str]) -> list[str]:
        steps = self._compared.any_steps
        texts = verdict.step_notes(self._runs, self._recorded, steps) + self._compared.notes()
        if not self._has_equal_sizes:
            texts += verdict.world_size_notes(
                self._runs,
                self._local_buffers,
                inputs_compared=self._is_reproducible,
                has_operations=any(recorded.operations for recorded in self._recorded),
            )
        if steps:
            phases = PHASES if self._has_equal_sizes else SHARED_PHASES
            texts += verdict.phase_notes(self._runs, self._recorded, phases)
        a, b = (run.folder.resolve() for run in self._runs)
        if a == b:
            texts.append("A and B are the same folder")
        return [*texts, *problems]


def _compare_settings(
    steps: Sequence[int],
    tensors: Key | None,
    runs: Iterable[Run],
    ranks: Iterable[int],
    open_pair: Callable[[int, int], AbstractContextManager[Pair]],
) -> SettingDifferences:
    """The settings that differ up to the step of the first different tensors; of all steps without any."""
    until = _settings_until(steps, tensors, [run.environments[0].start for run in runs])
    found = SettingDifferences([step for step in steps if step <= until], tensors and tensors[0])
    for rank in ranks:
        with open_pair(rank, until) as pair:
            found.add_rank(rank, pair)
    return found


def _settings_until(steps: Sequence[int], tensors: Key | None, starts: Sequence[int]) -> int:
    if tensors is None:
        return steps[-1] if steps else 0
    if tensors[0] not in starts:
        return tensors[0]
    # A start has no settings: those of the next step count.
    return min((step for step in steps if step > tensors[0]), default=tensors[0])


class _RankPairs:
    """Rank 0 of a run and every other rank, in the phases that ranks share."""

    _words = Words(
        "ranks",
        "all ranks",
        "no step was recorded by all ranks",
        "no phase that ranks share was recorded by all of them",
    )

    def __init__(self, run: Run) -> None:
        self._run = run
        self._keep = keep_shared(run.environments[0].local_buffers)
        self._recorded, self._compared = RunCoverage(""), verdict.ComparisonCoverage()
        self._locations = Locations()
        self._groups: dict[Key, RankGroups] = {}
        self._unfinished: set[tuple[int, str]] = set()
        self._other_settings: list[int] = []  # ranks
        with run.open(0) as reference:
            self._add(0, reference, reference)
            for rank in range(1, run.world_size):
                with run.open(rank) as trace:
                    self._add(rank, reference, trace)
        self._compared.leave_out(self._unfinished)

    def _add(self, rank: int, reference: RankTrace, trace: RankTrace) -> None:
        pair = self._pair(reference, trace)
        self._recorded.add(rank, trace)
        self._compared.add_rank(rank, pair.steps, pair.entry_counts())
        last = unfinished_step(trace)
        if last is not None:
            self._unfinished.update((last, phase) for phase in SHARED_PHASES if trace.digest(last, phase) is None)
        if SettingDifferences.has_any(pair):
            self._other_settings.append(rank)
        for step, phase in pair.candidates:  # parses the lines of one rank of each group
            key: Key = step, PHASES.index(phase)
            groups, digest = self._groups.setdefault(key, RankGroups()), trace.digest(step, phase)
            if not groups.add_known(rank, digest):
                differing, names = pair.differing(step, phase)
                groups.add(rank, digest, differing)
                if differing:
                    self._locations.add(key, rank, differing, names)

    def _pair(self, reference: RankTrace, trace: RankTrace) -> Pair:
        return Pair(reference, trace, SHARED_PHASES, self._keep, may_lack=())

    @contextmanager
    def _open(self, rank: int, until: int) -> Iterator[Pair]:
        with self._run.open(0, until) as reference, self._run.open(rank, until) as trace:
            yield self._pair(reference, trace)

    def found(self) -> Found:
        run, size, located = self._run, self._run.world_size, self._located()
        tensors = first_of_tensors(located)
        settings = _compare_settings(self._compared.steps, tensors, [run], self._other_settings, self._open)
        keys = {(item.first, SETTINGS) for item in settings.settings if not item.is_apart} & {*located}
        key = min(keys | ({tensors} if tensors else set()), default=None)
        divergences = divergences_of_ranks(run, key, self._keep) if key else []
        divergences.sort(key=lambda item: item.phase == "settings" and is_apart(item.name))
        first = divergences[0] if divergences else None
        around = self._environment_causes()
        return Found(
            words=self._words,
            runs=(run,),
            recorded=(self._recorded,),
            compared=self._compared,
            steps=self._compared.steps,
            locations=located,
            divergences=divergences,
            settings=settings,
            cause_of=partial(cause_of_ranks, world_size=size),
            around=around,
            evidence={"kind": "ranks", "world_size": size},
            operations=None,
            notes=self._notes(),
            notes_if_same=[f"{cause.what} differs between ranks and changed no bit" for cause in around],
            notes_about_operations=[_NO_OPERATIONS] if self._recorded.operations else (),
            equal=f"{size} ranks hold the same",
            where=_against(first) if first else "",
        )

    def _located(self) -> dict[Key, Differing]:
        """The locations that were compared on all ranks and differ, with the ranks outside the majority."""
        steps, phases, size = {*self._compared.steps}, self._compared.phases, self._run.world_size
        return {
            (step, phase): found._replace(ranks=self._groups[step, phase].outside_majority(size))
            for (step, phase), found in self._locations.found.items()
            if step in steps and PHASES[phase] in phases and (step, PHASES[phase]) not in self._unfinished
        }

    def _environment_causes(self) -> list[Cause]:
        """Facts of the environment that differ between ranks; the majority's value comes first."""
        rows = [
            {fact: item.facts[fact] for fact in causes.by_likelihood(list(item.facts)) if fact not in _FACTS_OF_A_RANK}
            for item in self._run.environments
        ]
        return [
            Cause(item.name, tuple((name_ranks(ranks), value) for value, ranks in item.holders[:MAX_SIDES]))
            for item in compare_rows(rows).differences
        ]

    def _notes(self) -> list[str]:
        recorded, size = self._recorded, self._run.world_size
        texts = recorded.notes()
        if missing := [phase for phase in SHARED_PHASES if 0 < len(recorded.phases.get(phase, ())) < size]:
            texts.append(f"not compared, because not all ranks recorded it: {', '.join(verdict.phase_labels(missing))}")
        texts += verdict.optimizer_notes([self._run], recorded.phases)
        return texts + verdict.local_buffer_notes(self._run.environments[0].local_buffers)


def _against(first: Divergence) -> str:
    labels = [side.label for side in reversed(first.sides)]  # the smallest group first
    return f": {' against '.join(first_few(labels, MAX_SIDES, '{} more groups'))}"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


def _traces(run: Run, until: int) -> Iterator[RankTrace]:
    """The files of all ranks up to a step. One file is open at a time."""
    for rank in range(run.world_size):
        with run.open(rank, until=until) as trace:
            yield trace
