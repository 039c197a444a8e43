"""Tables of the recorded calls of a run, by rank and step. Needs numpy."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from legacy_ddp.debug._page.binning import Floats
from legacy_ddp.debug._trace.read import RankTrace


@dataclass(frozen=True)
class CallTable:
    """The recorded calls of a run: a row for each rank, a column for each of ``steps``, NaN for a missing call.

    ``sizes``: items in the rank's gradient, 1 in a plain call, 0 for a rank without a part in the call. ``counted``:
    ``sizes`` come from ``sample_size``. ``damaged``: the local gradient was not finite. ``waited``: in seconds.
    ``reduced_norms``: of all parameters together, NaN if not finite. ``ends``: end of each rank's trace, as text.
    """

    steps: NDArray[np.int64]
    local_norms: Floats
    damaged: NDArray[np.bool_]
    waited: Floats
    sizes: Floats
    reduced_norms: Floats
    counted: bool
    ends: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return len(self.local_norms)


class RankCalls:
    """The recorded calls of one rank, in columns."""

    def __init__(self, trace: RankTrace) -> None:
        steps, damaged = array("q"), array("b")
        norms, waited, sizes = array("d"), array("d"), array("d")
        self.counted = False
        for step in trace.steps:
            call = trace.call(step)
            if call is None:
                continue
            steps.append(step)
            # The recorded norm leaves non-finite elements out.
            norms.append(nan if call.local_norm is None or call.finite is False else call.local_norm)
            damaged.append(call.finite is False)
            waited.append(call.seconds_waited)
            sizes.append(_size(call.took_part, call.sample_size))
            self.counted |= call.sample_size is not None
        self.steps = np.array(steps, dtype=np.int64)
        self.damaged = np.array(damaged, dtype=np.bool_)
        self.columns = [np.array(values, dtype=np.float64) for values in (norms, waited, sizes)]
        self.end = _end(trace)


def _size(took_part: bool, sample_size: int | None) -> int:
    if not took_part:
        return 0
    return 1 if sample_size is None else sample_size


def _end(trace: RankTrace) -> str:
    if trace.damage:
        return f"damaged: {trace.damage}"
    if trace.torn:
        return "last line torn: killed while it wrote"
    return trace.end or "no last line: killed, still running, or recorder stopped"


def call_table(ranks: Sequence[RankCalls], reduced_norms: Mapping[int, float]) -> CallTable:
    """The calls of all ranks, over the steps of any rank. ``reduced_norms``: by step."""
    steps = np.unique(np.concatenate([rank.steps for rank in ranks]))
    damaged = np.zeros((len(ranks), len(steps)), dtype=np.bool_)
    tables = [np.full((len(ranks), len(steps)), np.nan) for _ in range(3)]
    for row, rank in enumerate(ranks):
        columns = np.searchsorted(steps, rank.steps)
        damaged[row, columns] = rank.damaged
        for table, values in zip(tables, rank.columns, strict=True):
            table[row, columns] = values
    local_norms, waited, sizes = tables
    return CallTable(
        steps=steps,
        local_norms=local_norms,
        damaged=damaged,
        waited=waited,
        sizes=sizes,
        reduced_norms=np.array([reduced_norms.get(int(step), nan) for step in steps], dtype=np.float64),
        counted=any(rank.counted for rank in ranks),
        ends=tuple(rank.end for rank in ranks),
    )
