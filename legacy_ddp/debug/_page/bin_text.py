"""Labels of the columns of a grid, and captions about bins. Pure."""

from legacy_ddp.debug._page.binning import Bins, Grid


def column_labels(grid: Grid) -> list[str]:
    """The steps of every column."""
    return [_steps(grid, column) for column in range(grid.count)]


def _steps(grid: Grid, column: int) -> str:
    first, last = grid.span(column)
    begin = "start" if grid.start and column == 0 else str(first)
    return begin if first == last else f"{begin} to {last}"


def column_captions(grid: Grid, shown: str) -> list[str]:
    if grid.bins.size == 1:
        return [f"Each column stands for a recorded step, every {grid.stride}."] if grid.stride > 1 else []
    recorded = (
        f"{grid.bins.size} steps" if grid.stride == 1 else f"{grid.bins.size} recorded steps ({grid.width} steps)"
    )
    return [f"Each column stands for {recorded} and shows {shown}."]


def row_captions(rows: Bins, items: str) -> list[str]:
    return [f"Each row stands for {rows.size} {items} in the same way."] if rows.size > 1 else []
