"""Explanation of the first divergence: sentences selected by its phase and by the evidence. Pure."""

from collections.abc import Iterator

from legacy_ddp.debug._diff import call_diff
from legacy_ddp.debug._diff.evidence import Evidence
from legacy_ddp.debug._diff.explain_ranks import BETWEEN_RANKS
from legacy_ddp.debug._diff.explain_runs import AT_START, BETWEEN_RUNS
from legacy_ddp.debug._diff.growth import GROWTH_LIMIT, ROUNDING_LIMIT


def explain(evidence: Evidence) -> str:
    """The sentences which the evidence supports."""
    return " ".join(_sentences(evidence))


def _sentences(evidence: Evidence) -> Iterator[str]:
    if not evidence.is_start:
        yield from _previous_steps(evidence)
    table = BETWEEN_RANKS if evidence.kind == "ranks" else AT_START if evidence.is_start else BETWEEN_RUNS
    yield from table[evidence.first.phase](evidence)
    if evidence.kind == "sizes" and not evidence.is_start:
        yield _world_sizes(evidence)
    if evidence.kind != "ranks" and evidence.size is not None:
        yield from _size(evidence, evidence.size)


def _previous_steps(evidence: Evidence) -> Iterator[str]:
    step, previous = evidence.first.step, evidence.previous
    if previous is None:
        yield "Nothing before this step was compared, so the cause may lie earlier."
    elif previous == step - 1:
        yield f"All that was compared up to step {previous} agrees."
    else:
        yield f"Steps after {previous} and before this one were not compared, so the cause may lie in any of them."


def _world_sizes(evidence: Evidence) -> str:
    if evidence.reproducible and call_diff.TOTALS[0] not in evidence.causes:
        return (
            "Both add gradients in the order of a tree (reproducible=True): with a no_sync() block for each "
            "micro-batch the order of the sum is not the reason. A loss divided by the micro-batches of a rank would "
            "be one, and random numbers that follow from the rank."
        )
    return "Runs of other world sizes can be expected to hold the same bits only if sums are taken in the same order."


def _size(evidence: Evidence, size: float) -> Iterator[str]:
    if size > ROUNDING_LIMIT:
        yield f"Norms there differ by up to {size:.2g} relative: more than rounding usually makes at once."
        return
    yield f"Norms there differ by at most {size:.2g} relative: of rounding size, judged by norms alone."
    if (growth := evidence.growth) and growth.name:
        yield f"It grows beyond {GROWTH_LIMIT:.1%} at step {growth.step}: {growth.name}."
    elif growth:
        yield (
            f"Up to step {growth.last}, no norm of weights or reduced gradients differs by more than "
            f"{GROWTH_LIMIT:.1%}."
        )
