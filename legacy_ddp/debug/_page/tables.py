"""Tables of a page: operations around the first difference, and environments. Needs bokeh."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile

from legacy_ddp._compare import MISSING, compare_rows, name_ranks
from legacy_ddp.debug._diff.result import OperationFinding, OperationRow
from legacy_ddp.debug._operations.describe import at
from legacy_ddp.debug._page.chart import Chart
from legacy_ddp.debug._trace.records import Environment
from legacy_ddp.debug._trace.run import Run

# Besides colour, because some readers see none.
_MARK = "▶"
_MAX_GROUPS = 6


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


@dataclass(frozen=True)
class Row:
    """One fact: a cell for each run, and a text if ranks or runs differ."""

    fact: str
    values: tuple[str, ...]
    differs: str


def environment_rows(runs: Sequence[Run], ends: Sequence[Sequence[str]]) -> list[Row]:
    """A row for every fact; ``ends``: for every run, the end of each rank's trace."""
    facts = [
        [_facts(environment, end) for environment, end in zip(run.environments, run_ends, strict=True)]
        for run, run_ends in zip(runs, ends, strict=True)
    ]
    names = dict.fromkeys(name for run in facts for rank in run for name in rank)
    return [_row(name, [[rank.get(name, MISSING) for rank in run] for run in facts]) for name in names]


def _facts(environment: Environment, end: str) -> dict[str, str]:
    return {
        "ranks": str(environment.world_size),
        "started": environment.started,
        "recorded": f"every {environment.every} steps" if environment.every > 1 else "every step",
        "first step": str(environment.first_step),
        "parameters": str(len(environment.parameters)),
        "layout": environment.layout,
        **environment.facts,
        "end of the trace": end,
    }


def _row(fact: str, runs: Sequence[Sequence[str]]) -> Row:
    differs = []
    if fact != "started":  # always differs, and explains nothing
        if any(len(set(ranks)) > 1 for ranks in runs):
            differs.append("ranks differ")
        if len({tuple(dict.fromkeys(ranks)) for ranks in runs}) > 1:
            differs.append("runs differ")
    return Row(fact, tuple(_cell(ranks) for ranks in runs), ", ".join(differs))


def _cell(ranks: Sequence[str]) -> str:
    """The common value of all ranks, or every value with its ranks."""
    differences = compare_rows([{"": value} for value in ranks]).differences
    if not differences:
        return ranks[0]
    groups = differences[0].holders
    more = [f"{len(groups) - _MAX_GROUPS} more values"] if len(groups) > _MAX_GROUPS else []
    return "; ".join([*(f"{name_ranks(which)}: {value}" for value, which in groups[:_MAX_GROUPS]), *more])
