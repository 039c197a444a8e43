"""Data of a page, read from traces. Every file is read once, and only the sections shown on the page are parsed."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from legacy_ddp.debug._page.call_table import CallTable, RankCalls, call_table
from legacy_ddp.debug._page.loop_values import LoggedValues, Metric, read_metrics
from legacy_ddp.debug._page.parameter_cells import ParameterCells
from legacy_ddp.debug._trace.read import Progress
from legacy_ddp.debug._trace.run import Run


@dataclass(frozen=True)
class Series:
    """``parameters``: of all runs together. ``calls``: by run. ``every_rank``: all ranks were compared, not only 0.
    ``metrics``, ``logged``: by run.
    """

    parameters: ParameterCells
    calls: tuple[CallTable, ...]
    every_rank: bool
    metrics: tuple[Mapping[str, Metric], ...] = ()
    logged: tuple[LoggedValues, ...] = ()


def read_series(runs: Sequence[Run], progress: Progress = lambda _: None) -> Series:
    """Data of a page about one run or two. At most four files are open at a time.

    Raises:
        TraceError: a trace file cannot be read.
    """
    with ExitStack() as files:
        firsts = [files.enter_context(run.open(0, progress)) for run in runs]
        parameters = ParameterCells.over(firsts)
        reduced = [parameters.add_norms(first, shown=len(runs) == 1) for first in firsts]
        if len(runs) == 2:
            parameters.add_run_differences(firsts[0], firsts[1])
        calls = [[RankCalls(first)] for first in firsts]
        metrics, logged = tuple(map(read_metrics, firsts)), tuple(LoggedValues() for _ in runs)
        for values, first in zip(logged, firsts, strict=True):
            values.add(0, first)
        every_rank = len({run.world_size for run in runs}) == 1
        for rank in range(1, max(run.world_size for run in runs)):
            with ExitStack() as rank_files:
                indices = [index for index, run in enumerate(runs) if rank < run.world_size]
                others = [rank_files.enter_context(runs[index].open(rank, progress)) for index in indices]
                for index, other in zip(indices, others, strict=True):
                    calls[index].append(RankCalls(other))
                    logged[index].add(rank, other)
                if len(runs) == 1:
                    parameters.add_rank_differences(firsts[0], others[0])
                elif every_rank:
                    parameters.add_run_differences(others[0], others[1], known=(firsts[0], firsts[1]))
    tables = tuple(call_table(ranks, norms) for ranks, norms in zip(calls, reduced, strict=True))
    return Series(parameters, tables, every_rank, metrics, logged)
