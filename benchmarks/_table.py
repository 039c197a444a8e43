"""Definition of a table of figures from results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Place = tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """``places`` of numbers below `results`, and their format; words in braces are filled per row."""

    title: str
    places: tuple[Place, ...]
    form: str = "{:.2f}"
    is_range: bool = False  # from the least number to the greatest, each in that form
    file: str = ""  # another one than the table's


@dataclass(frozen=True)
class Table:
    """``rows``: label of a row -> words for the braces, also of ``file``."""

    file: str
    heading: str
    columns: Sequence[Column]
    rows: Mapping[str, Mapping[str, str]]
