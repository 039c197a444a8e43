"""Metrics and logged values of a run, by name. Needs numpy."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np
from numpy.typing import NDArray

from legacy_ddp.debug._page.binning import Floats
from legacy_ddp.debug._page.rank_lines import RankTable
from legacy_ddp.debug._trace.read import RankTrace


@dataclass(frozen=True)
class Metric:
    """The sums of a metric over the ranks, by step, NaN if not finite. ``divisors``: of the gradients, by step."""

    steps: NDArray[np.int64]
    sums: Floats
    divisors: Floats


@dataclass(frozen=True)
class LoggedText:
    """The last text that a rank logged under a name."""

    name: str
    rank: int
    step: int
    text: str


def read_metrics(trace: RankTrace) -> dict[str, Metric]:
    """All metrics in the trace of a rank; every rank has the same sums."""
    columns: dict[str, tuple[array[int], array[float], array[float]]] = {}
    for step in trace.steps:
        call = trace.call(step)
        if call is None:
            continue
        for name, value in call.metrics.items():
            steps, sums, divisors = columns.setdefault(name, (array("q"), array("d"), array("d")))
            steps.append(step)
            sums.append(value if isfinite(value) else nan)
            divisors.append(call.divisor or nan)  # 0: no rank took part
    return {
        name: Metric(np.array(steps, dtype=np.int64), np.array(sums), np.array(divisors))
        for name, (steps, sums, divisors) in columns.items()
    }


class LoggedValues:
    """The values logged by the ranks of a run. Ranks are added in ascending order."""

    def __init__(self) -> None:
        self.texts: list[LoggedText] = []
        self._numbers: dict[str, dict[int, dict[int, float]]] = {}
        self._ranks = 0

    def add(self, rank: int, trace: RankTrace) -> None:
        last: dict[str, LoggedText] = {}
        self._ranks = rank + 1
        for step, values in trace.logged.items():
            for name, value in values.items():
                if isinstance(value, str):
                    last[name] = LoggedText(name, rank, step, value)
                else:
                    of_rank = self._numbers.setdefault(name, {}).setdefault(rank, {})
                    of_rank[step] = value if isfinite(value) else nan
        self.texts += last.values()

    def tables(self) -> Mapping[str, RankTable]:
        """The numbers by name."""
        return {name: self._table(of_ranks) for name, of_ranks in self._numbers.items()}

    def _table(self, of_ranks: Mapping[int, Mapping[int, float]]) -> RankTable:
        steps = np.array(sorted({step for values in of_ranks.values() for step in values}), dtype=np.int64)
        table = np.full((self._ranks, len(steps)), np.nan)
        for rank, values in of_ranks.items():
            table[rank, np.searchsorted(steps, np.array([*values]))] = [*values.values()]
        return RankTable(steps, table)
