"""What was not compared between two runs, and why? Pure."""

from collections.abc import Iterable, Sequence

from legacy_ddp.debug._diff import environment_diff
from legacy_ddp.debug._diff.result import Cause
from legacy_ddp.debug._trace.coverage import RunCoverage
from legacy_ddp.debug._trace.line_format import PHASE_LABELS, PHASES
from legacy_ddp.debug._trace.run import Run

# A model may have no buffers, an optimizer no state; but one without settings was not given to the recorder.
NO_OPTIMIZER = "not compared: settings and state of the optimizer, for no recorder was given it (optimizer=)"


def of_steps(runs: tuple[Run, Run], extents: tuple[RunCoverage, RunCoverage], steps: Sequence[int]) -> list[str]:
    """Steps that only one run recorded."""
    notes = []
    every = [run.environments[0].every for run in runs]
    if every[0] != every[1]:
        notes.append(f"A recorded every {every[0]} steps, B every {every[1]}: {len(steps)} in common")
    for extent in extents if steps else ():
        if extent.steps and extent.steps[1] > max(steps):
            notes.append(f"{extent.label} goes on to step {extent.steps[1]}")
        if extent.steps and extent.steps[0] < min(steps):
            notes.append(f"{extent.label} begins with step {extent.steps[0]}")
    return notes + [note for extent in extents for note in extent.notes()]


def of_phases(extents: tuple[RunCoverage, RunCoverage], phases: Sequence[str] = PHASES) -> list[str]:
    """Phases that were not recorded by both; of neither is only what a recorder was not given."""
    a, b = (set(extent.phases) & set(phases) for extent in extents)
    notes = [
        f"not compared: {text} {' and no '.join(say_phases(which))}"
        for which, text in ((b - a, "A has no"), (a - b, "B has no"))
        if which
    ]
    return notes + ([NO_OPTIMIZER] if "settings" not in a | b else [])


def of_world_sizes(a: Run, b: Run, patterns: Iterable[str], *, inputs: bool) -> list[str]:
    """What cannot be compared between runs of other world sizes. ``inputs``: whether those can."""
    _, mixed = environment_diff.of_whole_runs(a.environments, b.environments)
    what = "local gradients" if inputs else "local gradients and inputs"
    notes = [f"world sizes {a.world_size} and {b.world_size}: {what} were not compared"]
    if mixed:
        notes.append(f"not compared, for ranks of a run differ in it: {', '.join(mixed)}")
    if named := sorted(patterns):
        notes.append(f"not compared, for each rank has its own: buffers {', '.join(named)}")
    return notes


def of_causes(causes: Sequence[Cause]) -> list[str]:
    """What differs around runs that do not."""
    told = []
    for cause in causes:
        sides = " and ".join(f"{value} in {label}" for label, value in cause.sides)
        told.append(f"{cause.what} differs and changed no bit: {sides}" + (f" ({cause.where})" if cause.where else ""))
    return told


def say_phases(phases: Iterable[str]) -> list[str]:
    """Phases in words, in their order."""
    return [PHASE_LABELS[phase] for phase in PHASES if phase in set(phases)]
