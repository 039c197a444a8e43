"""Table of the operations around the first different operation of a step. Needs bokeh."""

from collections.abc import Iterator

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
        f"{at(found.labels[1])}. Operations after the first difference differ because their inputs do.",
    )
    header = ("", *found.labels, "stage", "module", "operation", "comparison")
    yield Chart(f"Operations of step {found.step}{where}", captions, table=(header, *map(_cells, found.rows)))


def _cells(row: OperationRow) -> tuple[str, ...]:
    numbers = ("" if number is None else f"{number:,}" for number in row.numbers)
    return (_MARK if row.is_first else "", *numbers, row.stage, row.module, row.name, row.result)
