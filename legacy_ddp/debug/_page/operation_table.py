"""Table of the operations around the first different operation of a step. Needs bokeh."""

from collections.abc import Iterator
from itertools import dropwhile

from legacy_ddp._compare import name_ranks
from legacy_ddp.debug._diff.result import OperationFinding, OperationRow
from legacy_ddp.debug._operations.describe import at
from legacy_ddp.debug._page.chart import Chart

# Besides colour, because some readers see none.
_MARK = "▶"


def operation_table(found: OperationFinding | None) -> Iterator[Chart]:
    """The table, if there is a difference."""
    if found is None or not found.rows:
        return
    where = f" on {name_ranks(found.ranks)}" if found.ranks and found.labels == ("A", "B") else ""
    captions = (
        f"{_MARK} The first difference: {found.summary}.",
        f"Numbers count the operations of the step, {found.counts[0]:,} {at(found.labels[0])}, {found.counts[1]:,} "
        f"{at(found.labels[1])}.{_consequences(found)}",
    )
    header = ("", *found.labels, "stage", "module", "operation", "comparison")
    yield Chart(f"Operations of step {found.step}{where}", captions, table=(header, *map(_cells, found.rows)))


def _consequences(found: OperationFinding) -> str:
    """A sentence about rows behind the first difference, if there are any with other inputs."""
    behind = [*dropwhile(lambda row: not row.is_first, found.rows)]
    has_others = any(row.result == "inputs differ" and not row.is_first for row in behind)
    return (
        " After the first difference, operations with other inputs follow from a difference before them." * has_others
    )


def _cells(row: OperationRow) -> tuple[str, ...]:
    numbers = ("" if number is None else f"{number:,}" for number in row.numbers)
    return (_MARK if row.is_first else "", *numbers, row.stage, row.module, row.name, row.result)
