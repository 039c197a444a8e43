"""Tables of calls that no training made."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from legacy_ddp.debug._page.rank_series import Calls


def calls_table(
    local_norms: Sequence[Sequence[float]] | Any, reduced: Sequence[float] = (), sizes: float = 1.0, **changes: Any
) -> Calls:
    """Norms of a row for each rank; steps count from 1, and nobody waited."""
    table = np.array(local_norms, dtype=np.float64)
    given = Calls(
        steps=np.arange(1, table.shape[1] + 1),
        local_norms=table,
        damaged=np.zeros(table.shape, dtype=np.bool_),
        waited=np.zeros(table.shape),
        sizes=np.full(table.shape, sizes),
        reduced_norms=np.array(reduced or [1.0] * table.shape[1]),
        counted=False,
        ends=("closed",) * len(table),
    )
    return replace(given, **changes)
