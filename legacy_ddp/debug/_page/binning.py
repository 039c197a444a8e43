"""How do ten thousand steps fit on a screen? Bins that keep what stands out in them. Pure; needs numpy."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Positions = NDArray[np.intp]

# A column is then at least a pixel wide on a page of 800, and a row a pixel high: none vanishes between two pixels.
MOST_COLUMNS = 400
MOST_ROWS = 500
MOST_POINTS = 2000


@dataclass(frozen=True)
class Bins:
    """``total`` things in a row, ``size`` of them together; the last bin may have fewer."""

    total: int
    size: int

    @staticmethod
    def at_most(total: int, most: int) -> "Bins":
        return Bins(total, max(1, -(-total // most)))

    @property
    def count(self) -> int:
        return -(-self.total // self.size)

    @cached_property
    def starts(self) -> Positions:
        return np.arange(self.count, dtype=np.intp) * self.size

    def span(self, number: int) -> tuple[int, int]:
        """The first and the last thing in a bin."""
        return number * self.size, min(self.total, (number + 1) * self.size) - 1


@dataclass(frozen=True)
class Grid:
    """Columns of equal width over steps that were recorded every so often.

    ``first``: the step in the first place; ``stride``: steps between two places; ``bins``: of places, a column each.
    ``start``: what is in the first place was held before the first step.
    """

    first: int
    stride: int
    bins: Bins
    start: bool = False

    @staticmethod
    def of(steps: Collection[int], starts: Collection[int] = (), most: int = MOST_COLUMNS) -> "Grid":
        """``starts``: steps before the first one; they get the place before it, however far they are from it."""
        taken = sorted(set(steps)) or sorted(set(starts)) or [0]
        stride = gcd(*(step - taken[0] for step in taken)) or 1
        before = taken[0] - min(starts, default=taken[0])
        first = taken[0] - max(0, -(-before // stride)) * stride
        start = bool(starts) and (before > 0 or not steps)
        return Grid(first, stride, Bins.at_most((taken[-1] - first) // stride + 1, most), start)

    @property
    def count(self) -> int:
        return self.bins.count

    @property
    def width(self) -> int:
        """Of a column, in steps."""
        return self.bins.size * self.stride

    @property
    def left(self) -> float:
        """Edge of the first column; each step is in the middle of its place."""
        return self.first - self.stride / 2

    @property
    def last(self) -> int:
        return self.first + (self.bins.total - 1) * self.stride

    def holds(self, steps: Collection[int]) -> bool:
        """Whether each of these steps has a place."""
        return all(self.first <= step <= self.last and not (step - self.first) % self.stride for step in steps)

    def column(self, step: int) -> int:
        return (step - self.first) // self.stride // self.bins.size

    def span(self, column: int) -> tuple[int, int]:
        """The first and the last step of a column."""
        first, last = self.bins.span(column)
        return self.first + first * self.stride, self.first + last * self.stride


class Cells:
    """Rows and columns, each cell with the largest value that came into it, and whether anything in it stands out.

    ``largest``: NaN where no value came. ``nonfinite``: the largest number of non-finite elements. ``marked``: whether
    anything differed.
    """

    def __init__(self, rows: Bins, columns: int) -> None:
        self.rows = rows
        self.largest = np.full((rows.count, columns), np.nan)
        self.nonfinite = np.zeros((rows.count, columns), dtype=np.int64)
        self.marked = np.zeros((rows.count, columns), dtype=np.bool_)

    def put(self, column: int, values: Floats) -> None:
        """Take a value for every one of the things in rows, NaN for none."""
        binned = np.fmax.reduceat(values, self.rows.starts) if len(values) else values
        np.fmax(self.largest[:, column], binned, out=self.largest[:, column])

    def count(self, column: int, counts: Mapping[int, int]) -> None:
        """Take numbers of non-finite elements, by thing."""
        for thing, number in counts.items():
            row = thing // self.rows.size
            self.nonfinite[row, column] = max(number, self.nonfinite[row, column])

    def mark(self, column: int, things: Positions) -> None:
        """Take things that differ."""
        self.marked[things // self.rows.size, column] = True


def extremes(values: Floats, most: int = MOST_POINTS) -> Positions:
    """Where to draw a line through: everywhere, or at the smallest and the largest value of each of ``most / 2`` bins.

    NaN is no value; a bin of nothing else keeps one, so that a gap stays a gap.
    """
    if len(values) <= most:
        return np.arange(len(values), dtype=np.intp)
    kept: list[int] = []
    for start in (bins := Bins.at_most(len(values), most // 2)).starts:
        part = values[start : start + bins.size]
        ends = {int(np.nanargmin(part)), int(np.nanargmax(part))} if not np.isnan(part).all() else {0}
        kept.extend(int(start) + end for end in sorted(ends))
    return np.array(kept, dtype=np.intp)
