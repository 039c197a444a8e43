"""Synthetic tables of calls."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from legacy_ddp.debug._page.calls import CallTable


def make_call_table(
    local_norms: Sequence[Sequence[float]] | Any, reduced: Sequence[float] = (), sizes: float = 1.0, **changes: Any
) -> CallTable:
    """A table with these local norms, a row for each rank; steps count from 1 and no rank waited."""
    table = np.array(local_norms, dtype=np.float64)
    default = CallTable(
        steps=np.arange(1, table.shape[1] + 1),
        local_norms=table,
        damaged=np.zeros(table.shape, dtype=np.bool_),
        waited=np.zeros(table.shape),
        sizes=np.full(table.shape, sizes),
        reduced_norms=np.array(reduced or [1.0] * table.shape[1]),
        counted=False,
        ends=("closed",) * len(table),
    )
    return replace(default, **changes)
