"""What is a table of figures taken from results?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Place = tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """``places`` of numbers below `results`, and how to write them; words in braces are the row's blanks."""

    title: str
    places: tuple[Place, ...]
    form: str = "{:.2f}"
    is_range: bool = False  # from the least number to the greatest, each in that form
    file: str = ""  # another one than the table's


@dataclass(frozen=True)
class Table:
    """``rows``: what a row is called -> its blanks. ``file`` may have blanks, too."""

    file: str
    heading: str
    columns: Sequence[Column]
    rows: Mapping[str, Mapping[str, str]]
