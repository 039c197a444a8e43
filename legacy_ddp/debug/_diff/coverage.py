"""Coverage of a comparison: what was compared on every rank, and notes about what was not. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from legacy_ddp._text import name_ranks
from legacy_ddp.debug._diff import causes as environment_diff
from legacy_ddp.debug._diff.result import Cause
from legacy_ddp.debug._operations.operation import listed
from legacy_ddp.debug._trace.read import Run, RunCoverage, span
from legacy_ddp.debug._trace.records import PHASE_LABELS, PHASES


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
        """Restrict :attr:`steps` to the first and last step that other ranks compared; None if they compared none."""
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
    _, mixed = environment_diff.causes_by_run(a.environments, b.environments)
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
