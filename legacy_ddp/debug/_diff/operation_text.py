"""Text of 80 columns about the operations of a step. Pure."""

from collections.abc import Iterator

from legacy_ddp._compare import MAX_SIDES, name_ranks
from legacy_ddp._text import wrap
from legacy_ddp.debug._diff.result import OperationFinding
from legacy_ddp.debug._operations.describe import at, numbers


def lines(found: OperationFinding) -> Iterator[str]:
    """The section about operations, with the first difference first."""
    yield from wrap(f"operations of step {found.step}{_ranks(found)}: {_counts(found)}")
    yield from wrap(f"{found.summary}{_number(found)}", "  ")
    for item in found.details:
        yield from wrap(item, "    ")
    for item in found.earlier[:MAX_SIDES]:
        yield from wrap(item, "  ")
    yield from wrap(f"meaning: {found.meaning}", "  ")
    if found.next_step:
        yield from wrap(f"next: {found.next_step}", "  ")


def _ranks(found: OperationFinding) -> str:
    return f" on {name_ranks(found.ranks)}" if found.ranks and found.labels == ("A", "B") else ""


def _counts(found: OperationFinding) -> str:
    """``371 in A, 370 in B``, or ``371``."""
    a, b = found.counts
    numbers = f"{a:,}" if a == b else f"{a:,} {at(found.labels[0])}, {b:,} {at(found.labels[1])}"
    return f"{numbers}, the first that differs:" if found.kind else numbers


def _number(found: OperationFinding) -> str:
    """The number of the first different operation in the step, on each side."""
    first = next((row.numbers for row in found.rows if row.is_first), None)
    return f" ({numbers(first, found.labels)})" if first else ""
