"""What was compared on every rank, notes about what was not, and the verdict of a comparison. Pure."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from legacy_ddp._text import listed, name_ranks
from legacy_ddp.debug._diff.causes import SettingDifference, SettingDifferences, causes_by_run, setting_causes
from legacy_ddp.debug._diff.evidence import Evidence, explain
from legacy_ddp.debug._diff.pair import MAX_OTHERS, Differing, Key, merge
from legacy_ddp.debug._diff.result import Answer, Cause, Comparison, Divergence, MetricDifference, OperationFinding
from legacy_ddp.debug._trace.read import Run, RunCoverage, span
from legacy_ddp.debug._trace.records import PHASE_LABELS, PHASES

_DIVERGENCE_ERROR = "ReplicaDivergenceError"


class ComparisonCoverage:
    """Steps, phases and tensors compared so far. ``ranks``: number of ranks added."""

    def __init__(self) -> None:
        self.ranks = 0
        self._steps: Counter[int] = Counter()
        self._limits: list[tuple[int, int]] = []
        self._phases: dict[str, list[int]] = {}
        self._counts: Counter[tuple[int, str]] = Counter()

    def add_rank(self, rank: int, steps: Collection[int], counts: Mapping[tuple[int, str], int]) -> None:
        """Add the compared steps of a rank, and the number of compared entries by step and phase."""
        self.ranks += 1
        self._steps.update(steps)
        self._counts.update(counts)
        for phase in {phase for _, phase in counts}:
            self._phases.setdefault(phase, []).append(rank)

    def add_limit(self, steps: tuple[int, int] | None) -> None:
        """Leave out steps outside of ``steps``, the first and last step that other ranks compared. None: no step."""
        self._limits.append(steps or (0, -1))

    def leave_out(self, keys: Iterable[tuple[int, str]]) -> None:
        for key in keys:
            self._counts.pop(key, None)

    @property
    def any_steps(self) -> list[int]:
        """Steps compared on at least one rank, ascending."""
        return sorted(self._steps)

    @property
    def steps(self) -> list[int]:
        """Steps compared on every rank, ascending."""
        return sorted(
            step
            for step, ranks in self._steps.items()
            if ranks == self.ranks and all(first <= step <= last for first, last in self._limits)
        )

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases compared on every rank, in the order of training."""
        return tuple(phase for phase in PHASES if len(self._phases.get(phase, ())) == self.ranks)

    @property
    def tensors(self) -> int:
        """Number of tensors compared in :attr:`steps` and :attr:`phases`, on all ranks together."""
        steps, phases = set(self.steps), {*self.phases} - {"settings"}
        return sum(count for (step, phase), count in self._counts.items() if step in steps and phase in phases)

    def notes(self) -> list[str]:
        """A note for every group of ranks on which some phases were not compared."""
        missing: dict[tuple[int, ...], list[str]] = {}
        for phase in PHASES:
            if 0 < len(ranks := self._phases.get(phase, [])) < self.ranks:
                missing.setdefault(tuple(sorted({*range(self.ranks)} - {*ranks})), []).append(PHASE_LABELS[phase])
        return [
            f"not compared on {name_ranks(ranks)}, where not both runs recorded it: {', '.join(phases)}"
            for ranks, phases in missing.items()
        ]


def uncompared_steps(run_coverages: Sequence[RunCoverage], steps: Sequence[int]) -> str:
    """Text about steps that every run recorded, but that were not compared on every rank; empty without any.

    ``steps``: the steps compared on every rank, without a difference.
    """
    missing = set.intersection(*(run_coverage.recorded for run_coverage in run_coverages)) - {*steps}
    # Not the last step of a run: a killed job may leave it on some ranks only.
    if not missing - {run_coverage.steps[1] for run_coverage in run_coverages if run_coverage.steps}:
        return ""
    first = min(missing)
    ended = [
        f"{name_ranks(ranks)}{f' of {run_coverage.label}' if run_coverage.label else ''}"
        for run_coverage in run_coverages
        if (ranks := run_coverage.ended_before(first))
    ]
    reason = f", because {' and '.join(ended)} ended before" if ended else ""
    were = "were" if len(missing) > 1 else "was"
    agreed = f"nothing differs in {format_steps(steps)}" if steps else "no step was compared on every rank"
    return f"{span((first, max(missing)))} {were} not compared on every rank{reason}; {agreed}"


def format_steps(steps: Sequence[int]) -> str:
    """``steps 0-120``; with the number of steps if some in between are missing."""
    text = span((steps[0], steps[-1]))
    return text if len(steps) == steps[-1] - steps[0] + 1 else f"{text} ({len(steps):,} compared)"


def step_notes(runs: Sequence[Run], run_coverages: Sequence[RunCoverage], steps: Sequence[int]) -> list[str]:
    """Notes about steps that only one run recorded, then the notes about each run. ``steps``: of both, ascending."""
    notes = []
    every = [run.environments[0].every for run in runs]
    if every[0] != every[1]:
        notes.append(f"A recorded every {every[0]} steps, B every {every[1]}: {len(steps)} in common")
    for run_coverage in run_coverages:
        if not steps or not run_coverage.steps:
            continue
        first, last = run_coverage.steps
        if last > max(steps):
            notes.append(f"{run_coverage.label} goes on to step {last}")
        if first < min(steps):
            notes.append(f"{run_coverage.label} begins with step {first}")
    return notes + [note for run_coverage in run_coverages for note in run_coverage.notes()]


def phase_notes(runs: Sequence[Run], run_coverages: Sequence[RunCoverage], phases: Sequence[str]) -> list[str]:
    """Notes about phases that only one run recorded, and about optimizer phases that neither run recorded."""
    a, b = (set(run_coverage.phases) & set(phases) for run_coverage in run_coverages)
    notes = [
        f"not compared: {text} {' and no '.join(phase_labels(only))}"
        for only, text in ((b - a, "A has no"), (a - b, "B has no"))
        if only
    ]
    return notes + optimizer_notes(runs, a | b)


def optimizer_notes(runs: Iterable[Run], phases: Collection[str]) -> list[str]:
    """A note about missing settings and state of the optimizer. ``phases``: those recorded in any file."""
    if "settings" in phases:  # every step of an optimizer has settings, but not every optimizer has state
        return []
    if not any(environment.has_optimizer for run in runs for environment in run.environments):
        return ["not compared: settings and state of the optimizer; pass optimizer= to Recorder to record them"]
    missing = " and ".join(phase_labels({"settings", "optimizer"}.difference(phases)))
    return [f"not compared: {missing}, because no optimizer step after an all_reduce() was recorded"]


def world_size_notes(
    runs: Sequence[Run], patterns: Sequence[str], *, inputs_compared: bool, has_operations: bool
) -> list[str]:
    a, b = runs
    _, mixed = causes_by_run(a.environments, b.environments)
    parts = ["local gradients", *["inputs"] * (not inputs_compared), *["operations"] * has_operations]
    notes = [f"world sizes {a.world_size} and {b.world_size}: {listed(parts)} were not compared"]
    if mixed:
        notes.append(f"not compared, because ranks of a run differ in it: {', '.join(mixed)}")
    return notes + local_buffer_notes(patterns)


def local_buffer_notes(patterns: Sequence[str]) -> list[str]:
    return [f"not compared, because each rank has its own: buffers {', '.join(patterns)}"] if patterns else []


def cause_notes(causes: Sequence[Cause]) -> list[str]:
    notes = []
    for cause in causes:
        sides = " and ".join(f"{value} in {label}" for label, value in cause.sides)
        notes.append(f"{cause.what} differs and changed no bit: {sides}" + (f" ({cause.where})" if cause.where else ""))
    return notes


def phase_labels(phases: Iterable[str]) -> list[str]:
    return [PHASE_LABELS[phase] for phase in PHASES if phase in set(phases)]


@dataclass(frozen=True)
class Words:
    """Words for headlines. ``noun``: of the sides. ``everyone``: all sides, as the subject of a sentence."""

    noun: str
    everyone: str
    no_step: str
    no_phase: str


@dataclass(frozen=True)
class Found:
    """What the comparison of all pairs found.

    ``recorded``: by each run. ``compared``: on every rank. ``steps``: those in which a difference counts, ascending.
    ``locations``: all locations with a difference. ``divergences``: the differences in the first location.
    ``settings``: those that differ, with ``cause_of`` for their texts. ``around``, ``calls``: differences of the
    environment and of the calls. ``evidence``: fields of :class:`Evidence` that only one kind of comparison has.
    ``notes``: about parts that were not compared. ``notes_if_same``: about a different environment that changed no bit.
    ``equal``, ``where``: for the headline, the equal sides and the ranks of the first divergence. ``problems``:
    differences between the ranks of one run.
    """

    words: Words
    runs: tuple[Run, ...]
    recorded: tuple[RunCoverage, ...]
    compared: ComparisonCoverage
    steps: Sequence[int]
    locations: Mapping[Key, Differing]
    divergences: Sequence[Divergence]
    settings: SettingDifferences
    cause_of: Callable[[SettingDifference], Cause]
    around: Sequence[Cause]
    evidence: Mapping[str, Any]
    operations: OperationFinding | None
    notes: Sequence[str]
    notes_if_same: Sequence[str]
    notes_about_operations: Iterable[str]
    equal: str
    where: str
    calls: Sequence[Cause] = ()
    problems: Sequence[str] = ()
    metrics: tuple[MetricDifference, ...] = ()

    def starting_runs(self, step: int) -> list[str]:
        """Labels of the runs that start with the state after ``step``."""
        pairs = zip(self.recorded, self.runs, strict=True)
        return [item.label for item, run in pairs if step == run.environments[0].start]

    def resumed(self) -> tuple[str, int] | None:
        """Label and start of the run that starts later; None if all runs start with the same step."""
        starts = {run.environments[0].start: item for item, run in zip(self.recorded, self.runs, strict=True)}
        return (starts[max(starts)].label, max(starts)) if len(starts) > 1 else None


def find_verdict(found: Found) -> Comparison:
    """The result: a difference if there is one, else the first doubt, else equality."""
    first = next(iter(found.divergences), None)
    likely, others, apart = setting_causes(found.settings, first, found.cause_of)
    if first:
        return _different(found, first, [*likely, *found.around, *found.calls, *others], apart)
    if doubt := next(filter(None, _doubts(found)), ""):
        return _comparison(found, "unknown", f"cannot tell: {doubt}")
    phases, tensors, steps = len(found.compared.phases), found.compared.tensors, found.compared.steps
    counts = f"{phases} phase{'s' * (phases > 1)}, {tensors:,} tensor{'s' * (tensors != 1)}"
    headline = f"same: {found.equal}, {format_steps(steps)}, {counts}, bit for bit"
    changed_no_bit = [*found.notes_if_same, *cause_notes([*likely, *others, *apart])]
    return _comparison(found, "same", headline, changed_no_bit)


def _different(found: Found, first: Divergence, causes: Sequence[Cause], apart: Sequence[Cause]) -> Comparison:
    start: Key = first.step, PHASES.index(first.phase)
    later = {key: item for key, item in found.locations.items() if key >= start}  # earlier settings are causes
    locations, more_locations = merge(later, found.steps)
    starting = found.starting_runs(first.step)
    evidence = Evidence(
        first=first,
        compared=found.compared.phases,
        is_start=bool(starting),
        starting_run=starting[0] if len(starting) == 1 else "",
        previous=max((step for step in found.steps if step < first.step), default=None),
        resumed=found.resumed(),
        settings=found.settings.settings,
        optimizer_steps=found.settings.optimizer_steps,
        causes=frozenset(cause.what for cause in causes),
        **found.evidence,
    )
    when = f"at the start (step {first.step})" if starting else f"at step {first.step}"
    return _comparison(
        found,
        "different",
        f"different: {found.words.noun} part {when} in {PHASE_LABELS[first.phase]}{found.where}: {first.name}",
        first=first,
        others=tuple(found.divergences[1 : MAX_OTHERS + 1]),
        size=evidence.size,
        explanation=explain(evidence),
        causes=tuple(causes),
        settings_apart=tuple(apart),
        locations=locations,
        more_locations=more_locations,
    )


def _doubts(found: Found) -> Iterator[str]:
    """Reasons not to say ``same`` although nothing differs, the most important first. An empty text is no reason."""
    steps = found.compared.steps
    for run, recorded in zip(found.runs, found.recorded, strict=True):
        if recorded.damage:
            agreed = "nothing differs in what can be compared" if steps else "nothing before it to compare"
            yield f"{run.folder / recorded.damage[0][1]}; {agreed}"
    if len(found.runs) > 1 and not found.compared.any_steps:
        spans = " and ".join(f"{item.label} has {item.span()}" for item in found.recorded)
        yield f"no step in common ({spans})"
    if found.problems:
        yield f"rank 0 of each run holds the same, but {found.problems[0]}"
    yield uncompared_steps(found.recorded, steps)
    if not steps:
        yield found.words.no_step
    if not found.compared.phases:
        yield found.words.no_phase
    if len(found.runs) == 1 and _DIVERGENCE_ERROR in found.recorded[0].reasons:
        yield (
            f"the run ended by {_DIVERGENCE_ERROR} after step {steps[-1]}; all ranks agree up to there, and the error "
            "shows what differed next"
        )
    if all(found.starting_runs(step) for step in steps):
        yield f"only the start ({format_steps(steps)}) was recorded by {found.words.everyone}, where they agree"


def _comparison(found: Found, verdict: Answer, headline: str, notes: Sequence[str] = (), **more: Any) -> Comparison:
    steps = found.compared.steps
    if verdict == "same" and found.operations:
        headline += "; operations differ, see below"
    return Comparison(
        tuple(str(run.folder) for run in found.runs),
        verdict,
        headline,
        (steps[0], steps[-1]) if steps else None,
        metrics=found.metrics,
        operations=found.operations,
        notes=(*found.notes, *notes, *found.notes_about_operations),
        **more,
    )
