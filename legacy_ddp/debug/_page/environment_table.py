"""Table of the environments of all ranks of the runs on a page, with a column for differences. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from legacy_ddp._compare import compare_rows, name_ranks
from legacy_ddp.debug._trace.records import Environment
from legacy_ddp.debug._trace.run import Run

_MAX_GROUPS = 6
_ABSENT = "nothing"


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
    return [_row(name, [[rank.get(name, _ABSENT) for rank in run] for run in facts]) for name in names]


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
