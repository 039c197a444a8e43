"""Definition of a table of figures from results, and of a figure inside a sentence."""

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
    between: str = " – "  # noqa: RUF001 - the ends of a range
    is_text: bool = False  # a text of the results
    file: str = ""  # another one than the table's


@dataclass(frozen=True)
class Table:
    """``rows``: label of a row -> words for the braces, also of ``file``."""

    file: str
    heading: str
    columns: Sequence[Column]
    rows: Mapping[str, Mapping[str, str]]


def figure(file: str, *places: Place, form: str = "{:.2f}") -> Column:
    """A figure inside a sentence, or a range of several."""
    return Column("", places, form, is_range=len(places) > 1, between=" to ", file=file)
