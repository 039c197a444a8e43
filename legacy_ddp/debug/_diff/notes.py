"""Notes of a comparison: parts of the traces without a comparison, and the reasons. Pure."""

from collections.abc import Collection, Iterable, Sequence

from legacy_ddp.debug._diff import environment_diff
from legacy_ddp.debug._diff.result import Cause
from legacy_ddp.debug._trace.records import PHASE_LABELS, PHASES
from legacy_ddp.debug._trace.run import Run, RunCoverage


def step_notes(
    runs: tuple[Run, Run], run_coverages: tuple[RunCoverage, RunCoverage], steps: Sequence[int]
) -> list[str]:
    """Steps which only one run recorded."""
    notes = []
    every = [run.environments[0].every for run in runs]
    if every[0] != every[1]:
        notes.append(f"A recorded every {every[0]} steps, B every {every[1]}: {len(steps)} in common")
    for run_coverage in run_coverages if steps else ():
        if run_coverage.steps and run_coverage.steps[1] > max(steps):
            notes.append(f"{run_coverage.label} goes on to step {run_coverage.steps[1]}")
        if run_coverage.steps and run_coverage.steps[0] < min(steps):
            notes.append(f"{run_coverage.label} begins with step {run_coverage.steps[0]}")
    return notes + [note for run_coverage in run_coverages for note in run_coverage.notes()]


def phase_notes(
    runs: tuple[Run, Run], run_coverages: tuple[RunCoverage, RunCoverage], phases: Sequence[str] = PHASES
) -> list[str]:
    """Phases which only one run recorded, and optimizer phases which neither run recorded."""
    a, b = (set(run_coverage.phases) & set(phases) for run_coverage in run_coverages)
    notes = [
        f"not compared: {text} {' and no '.join(phase_labels(only))}"
        for only, text in ((b - a, "A has no"), (a - b, "B has no"))
        if only
    ]
    return notes + optimizer_notes(runs, a | b)


def optimizer_notes(runs: Iterable[Run], phases: Collection[str]) -> list[str]:
    """A note about missing settings and state of the optimizer. ``phases``: of any file.

    A model may lack buffers and an optimizer may lack state. Settings come with every step of an optimizer.
    """
    if "settings" in phases:
        return []
    if not any(environment.has_optimizer for run in runs for environment in run.environments):
        return ["not compared: settings and state of the optimizer, for no recorder was given it (optimizer=)"]
    missing = " and ".join(phase_labels({"settings", "optimizer"}.difference(phases)))
    return [f"not compared: {missing}, for no optimizer step after an all_reduce() was recorded"]


def world_size_notes(
    runs: tuple[Run, Run], patterns: Sequence[str], *, inputs_compared: bool, has_operations: bool
) -> list[str]:
    """Parts which cannot be compared between runs of different world sizes."""
    a, b = runs
    _, mixed = environment_diff.causes_by_run(a.environments, b.environments)
    parts = ["local gradients", *["inputs"] * (not inputs_compared), *["operations"] * has_operations]
    notes = [f"world sizes {a.world_size} and {b.world_size}: {_listed(parts)} were not compared"]
    if mixed:
        notes.append(f"not compared, for ranks of a run differ in it: {', '.join(mixed)}")
    return notes + local_buffer_notes(patterns)


def local_buffer_notes(patterns: Sequence[str]) -> list[str]:
    """Buffers of single ranks."""
    return [f"not compared, for each rank has its own: buffers {', '.join(patterns)}"] if patterns else []


def cause_notes(causes: Sequence[Cause]) -> list[str]:
    """Differences around two runs which hold equal values."""
    notes = []
    for cause in causes:
        sides = " and ".join(f"{value} in {label}" for label, value in cause.sides)
        notes.append(f"{cause.what} differs and changed no bit: {sides}" + (f" ({cause.where})" if cause.where else ""))
    return notes


def _listed(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, or ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def phase_labels(phases: Iterable[str]) -> list[str]:
    """Labels of the phases, in the order of ``PHASES``."""
    return [PHASE_LABELS[phase] for phase in PHASES if phase in set(phases)]
