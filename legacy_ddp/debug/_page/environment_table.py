"""Where did the runs of a page take place, and in what do they differ? Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from legacy_ddp._compare import name_ranks
from legacy_ddp.debug._trace.records import Environment
from legacy_ddp.debug._trace.run import Run

_MOST_GROUPS = 6
_ABSENT = "nothing"


@dataclass(frozen=True)
class Row:
    """One line of a table: a value for each run, and in what it differs, empty if in nothing."""

    what: str
    values: tuple[str, ...]
    differs: str


def environment_rows(runs: Sequence[Run], ends: Sequence[Sequence[str]]) -> list[Row]:
    """Facts of all ranks of the runs; ``ends``: how each rank's trace ends."""
    told = [
        [_facts(environment, end) for environment, end in zip(run.environments, run_ends, strict=True)]
        for run, run_ends in zip(runs, ends, strict=True)
    ]
    whats = dict.fromkeys(what for run in told for rank in run for what in rank)
    return [_row(what, [[rank.get(what, _ABSENT) for rank in run] for run in told]) for what in whats]


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


def _row(what: str, runs: Sequence[Sequence[str]]) -> Row:
    differs = []
    # A run starts when it starts; that two did not at once explains nothing.
    if what != "started":
        if any(len(set(ranks)) > 1 for ranks in runs):
            differs.append("ranks differ")
        if len({tuple(dict.fromkeys(ranks)) for ranks in runs}) > 1:
            differs.append("runs differ")
    return Row(what, tuple(_told(ranks) for ranks in runs), ", ".join(differs))


def _told(ranks: Sequence[str]) -> str:
    """One value, or which ranks have which."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(ranks):
        holders.setdefault(value, []).append(rank)
    if len(holders) == 1:
        return ranks[0]
    groups = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
    more = [f"{len(groups) - _MOST_GROUPS} more values"] if len(groups) > _MOST_GROUPS else []
    return "; ".join([*(f"{name_ranks(which)}: {value}" for value, which in groups[:_MOST_GROUPS]), *more])
