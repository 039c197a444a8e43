"""Where do two runs part? Bits judge; environments, inputs and generators only explain."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from legacy_ddp._compare import name_ranks
from legacy_ddp.debug._diff import call_diff, environment_diff, notes
from legacy_ddp.debug._diff.call_diff import Calls
from legacy_ddp.debug._diff.compare_ranks import compare_ranks
from legacy_ddp.debug._diff.coverage import Coverage, shortfall, span_of
from legacy_ddp.debug._diff.explain import Evidence, meaning
from legacy_ddp.debug._diff.growth import ROUNDING, Growth, follow
from legacy_ddp.debug._diff.locations import Key, Places, join
from legacy_ddp.debug._diff.pair import Pair
from legacy_ddp.debug._diff.result import Cause, Comparison, Divergence, Place, Verdict
from legacy_ddp.debug._diff.same_model import check_same_model
from legacy_ddp.debug._diff.sections import SHARED, keep_shared, unequal, whole_norm
from legacy_ddp.debug._trace.coverage import RunCoverage
from legacy_ddp.debug._trace.line_format import PHASE_LABELS, PHASES
from legacy_ddp.debug._trace.read import Progress, RankTrace
from legacy_ddp.debug._trace.run import Run


def compare_runs(a: Run, b: Run, progress: Progress = lambda _: None) -> Comparison:
    """What two runs hold differently in the steps and phases that both recorded.

    Rank r is compared with rank r; runs of other world sizes in what all ranks of each share, by rank 0, after it was
    seen that they do share it. Time grows with the size of both traces: every byte is looked through once; where lines
    differ their words are parsed, and all of a line only in the first place. Two files are open at a time; memory grows
    with the number of steps and of ranks, and with both (see :class:`RankWords`) only for other world sizes.

    Raises:
        TraceError: a trace cannot be read, or they are of other models.
    """
    return _RunComparison(a, b, progress).compare()


class _RunComparison:
    def __init__(self, a: Run, b: Run, progress: Progress) -> None:
        self._a = a
        self._b = b
        self._progress = progress
        self._equal_sizes = a.world_size == b.world_size
        self._places = Places()
        self._settings = Places()  # which judge only where they part anything else
        self._calls = Calls()
        self._extents = RunCoverage("A"), RunCoverage("B")
        self._coverage = Coverage()
        self._doubts: list[str] = []

    def compare(self) -> Comparison:
        for rank in range(self._a.world_size) if self._equal_sizes else (0,):
            with self._open(rank, self._progress) as pair:
                self._take(rank, pair)
        if not self._equal_sizes:
            self._look_inside()
        if self._places:
            return self._different()
        return self._told(*self._agreement())

    def _agreement(self) -> tuple[Verdict, str]:
        """What can be said where nothing differs."""
        steps = self._coverage.steps
        for run, extent in zip((self._a, self._b), self._extents, strict=True):
            if extent.damage:
                agreed = "nothing differs in what can be compared" if steps else "nothing before it to compare"
                return "unknown", f"cannot tell: {run.folder / extent.damage[0][1]}; {agreed}"
        if not self._coverage.any_steps:
            spans = " and ".join(
                f"{label} has {extent.span()}" for label, extent in zip("AB", self._extents, strict=True)
            )
            return "unknown", f"cannot tell: no step in common ({spans})"
        if self._doubts:
            return "unknown", f"cannot tell: rank 0 of each run holds the same, but {self._doubts[0]}"
        if short := shortfall(self._extents, steps):
            return "unknown", f"cannot tell: {short}"
        if not steps:
            return "unknown", "cannot tell: no step was compared on every rank"
        if not self._coverage.phases:
            return "unknown", "cannot tell: no phase was recorded by both"
        if all(self._is_start(step) for step in steps):
            return "unknown", f"cannot tell: only the start ({span_of(steps)}) was recorded by both, where they agree"
        return "same", f"same: {self._ranks}, {span_of(steps)}, {self._amount}, bit for bit"

    def _look_inside(self) -> None:
        """What rank 0 of each says counts for the others only if they agree with it, and as far as they do."""
        for label, run in (("A", self._a), ("B", self._b)):
            if run.world_size > 1:
                inside = compare_ranks(run)
                self._coverage.limit(inside.steps)
                if inside.verdict != "same":
                    self._doubts.append(f"inside {label}: {inside.headline}")

    @property
    def _in_one_order(self) -> bool:
        """Whether both add gradients in an order that the number of ranks has no say in."""
        environments = (*self._a.environments, *self._b.environments)
        return all(environment.facts.get("reproducible") == "True" for environment in environments)

    @property
    def _patterns(self) -> list[str]:
        """Buffers that ranks of either run have of their own."""
        return sorted({*self._a.environments[0].local_buffers, *self._b.environments[0].local_buffers})

    @property
    def _ranks(self) -> str:
        if not self._equal_sizes:
            return f"what ranks of {self._a.world_size} and of {self._b.world_size} share"
        return f"{self._a.world_size} rank{'s' * (self._a.world_size > 1)}"

    @property
    def _amount(self) -> str:
        phases, tensors = len(self._coverage.phases), self._coverage.tensors
        return f"{phases} phase{'s' * (phases > 1)}, {tensors:,} tensor{'s' * (tensors != 1)}"

    @contextmanager
    def _open(self, rank: int, progress: Progress) -> Iterator[Pair]:
        with self._a.open(rank, progress) as a, self._b.open(rank, progress) as b:
            yield Pair(a, b) if self._equal_sizes else Pair(a, b, SHARED, keep_shared(self._patterns))

    def _take(self, rank: int, pair: Pair) -> None:
        """Compare one rank's files."""
        for extent, trace in zip(self._extents, (pair.a, pair.b), strict=True):
            extent.add(rank, trace)
        check_same_model(pair, self._a.folder, self._b.folder)
        self._coverage.take(rank, pair.steps, pair.amounts())
        for step, phase in pair.suspects():
            self._examine(rank, pair, step, phase)
        if self._equal_sizes:
            self._calls.take(rank, pair, self._places.first_step)

    def _examine(self, rank: int, pair: Pair, step: int, phase: str) -> None:
        key = step, PHASES.index(phase)
        places = self._settings if phase == "settings" else self._places
        differing, names = pair.differing(step, phase)
        if not differing:
            return
        places.add(key, rank, differing, names)
        if places.may_be_first(key):
            a, b = pair.held(step, phase)
            whole = whole_norm(entry.norm for entry in a.values()) if phase.endswith("gradients") else 0.0
            places.detail(key, rank, unequal(a, b), whole)

    @property
    def _parted_by_settings(self) -> bool:
        """Whether settings differ for the first time in the very step in which what follows from them does."""
        settings, others = self._settings.first_key, self._places.first_key
        return settings is not None and others is not None and settings[0] == others[0] and settings < others

    def _different(self) -> Comparison:
        first, *others = (self._settings if self._parted_by_settings else self._places).divergences()
        causes = self._causes(first.step)
        evidence = self._evidence(first, causes)
        places, more = self._from(first)
        found = self._told("different", self._parting(first))
        return replace(
            found,
            first=first,
            others=tuple(others),
            size=None if self._parted_by_settings else self._places.size,
            meaning=meaning(evidence),
            causes=tuple(causes),
            places=places,
            more_places=more,
        )

    def _from(self, first: Divergence) -> tuple[tuple[Place, ...], int]:
        """The first few places, and the number of others; settings that differed before it are among the causes."""
        marks = {**self._places.marks, **self._settings.marks}
        return join({key: mark for key, mark in marks.items() if key >= _key(first)}, self._coverage.any_steps)

    def _parting(self, first: Divergence) -> str:
        where = f" of {name_ranks(first.ranks)}" if self._equal_sizes else ""
        when = f"at the start (step {first.step})" if self._is_start(first.step) else f"at step {first.step}"
        return f"different: runs part {when} in {PHASE_LABELS[first.phase]}{where}: {first.name}"

    def _is_start(self, step: int) -> bool:
        return step in (self._a.environments[0].first_step - 1, self._b.environments[0].first_step - 1)

    def _begins(self, step: int) -> str:
        """The only run that begins with that step."""
        labels = [
            label for label, run in (("A", self._a), ("B", self._b)) if step == run.environments[0].first_step - 1
        ]
        return labels[0] if len(labels) == 1 else ""

    def _surroundings(self) -> list[Cause]:
        a, b = self._a.environments, self._b.environments
        if self._equal_sizes:
            return environment_diff.of_equal_ranks(list(zip(a, b, strict=True)))
        return environment_diff.of_whole_runs(a, b)[0]

    def _setting_causes(self, until: int | None = None) -> list[Cause]:
        """Settings that differ up to a step; no more than a few, for they differ from then on."""
        return [
            Cause(
                item.name, tuple((side.label, side.word or "nothing") for side in item.sides), f"from step {item.step}"
            )
            for item in self._settings.divergences()
            if until is None or item.step <= until
        ]

    def _causes(self, until: int) -> list[Cause]:
        around = [*self._surroundings(), *([] if self._parted_by_settings else self._setting_causes(until))]
        if self._equal_sizes:
            return [*around, *self._calls.causes(until)]
        totals = [call_diff.amounts(_traces(run, until), until, run.world_size) for run in (self._a, self._b)]
        return [*around, *call_diff.of_amounts(*totals, in_one_order=self._in_one_order)]

    def _evidence(self, first: Divergence, causes: list[Cause]) -> Evidence:
        before = [step for step in self._coverage.any_steps if step < first.step]
        size = None if self._parted_by_settings else self._places.size
        return Evidence(
            kind="runs" if self._equal_sizes else "sizes",
            first=first,
            compared=self._coverage.phases,
            is_start=self._is_start(first.step),
            begins=self._begins(first.step),
            previous=max(before, default=None),
            causes=frozenset(cause.what for cause in causes),
            inputs_known=all(self._calls.inputs_known(rank) for rank in first.ranks),
            in_one_order=self._in_one_order,
            generators_known=all(self._calls.knows(rank) for rank in first.ranks),
            size=size,
            growth=self._growth(first) if size is not None and size <= ROUNDING else None,
        )

    def _growth(self, first: Divergence) -> Growth:
        """Reads the files of one rank again."""
        with self._open(first.ranks[0], lambda _: None) as pair:
            return follow(pair, first.step)

    def _told(self, verdict: Verdict, headline: str) -> Comparison:
        compared = self._coverage.steps
        steps = (compared[0], compared[-1]) if compared else None
        folders = str(self._a.folder), str(self._b.folder)
        return Comparison(folders, verdict, headline, steps, notes=tuple(self._notes(verdict)))

    def _notes(self, verdict: Verdict) -> list[str]:
        steps = self._coverage.any_steps
        texts = notes.of_steps((self._a, self._b), self._extents, steps) + self._coverage.notes()
        if not self._equal_sizes:
            texts += notes.of_world_sizes(self._a, self._b, self._patterns, inputs=self._in_one_order)
        texts += notes.of_phases(self._extents, PHASES if self._equal_sizes else SHARED) if steps else []
        if self._a.folder.resolve() == self._b.folder.resolve():
            texts.append("A and B are the same folder")
        texts += self._doubts
        return texts + (notes.of_causes([*self._surroundings(), *self._setting_causes()]) if verdict == "same" else [])


def _key(where: Divergence) -> Key:
    return where.step, PHASES.index(where.phase)


def _traces(run: Run, until: int) -> Iterator[RankTrace]:
    """Every rank's file, up to a step."""
    for rank in range(run.world_size):
        with run.open(rank, until=until) as trace:
            yield trace
