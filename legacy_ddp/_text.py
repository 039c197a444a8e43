"""Layout of text on a page of 80 columns, and values as JSON has them. Pure."""

import math
import textwrap
from collections.abc import Iterable

WIDTH = 80
TIE = "\N{NO-BREAK SPACE}"


def printable(text: str) -> str:
    """The text with escapes for control characters and other unprintable characters."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def encodable(text: str) -> str:
    """The text with escapes for lone surrogates, which UTF-8 cannot hold: from file names that are no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def plain(value: float | str) -> float | str:
    """The value as JSON has it: NaN and infinity as ``nan``, ``inf`` or ``-inf``."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def wrap(
    text: str,
    indent: str = "",
    deeper: str = "  ",
    *,
    columns: int = WIDTH,
    break_words: bool = True,
    ties: bool = False,
) -> list[str]:
    """Lines of at most ``columns`` columns. ``deeper``: additional indent of all lines but the first.

    ``break_words``: break a word that is longer than a line; without, its line is too long. ``ties``: every ``TIE`` in
    the text becomes a space at which no line ends.
    """
    lines = textwrap.wrap(
        TIE.join(map(printable, text.split(TIE))) if ties else printable(text),
        columns,
        initial_indent=indent,
        subsequent_indent=indent + deeper,
        break_long_words=break_words,
        break_on_hyphens=False,
    )
    return [line.replace(TIE, " ") for line in lines]


def shorten(text: str, columns: int) -> str:
    """The text; beginning and end of a text longer than ``columns``."""
    text = printable(text)
    if len(text) <= columns:
        return text
    head = (columns - 3) // 2
    return f"{text[:head]}...{text[len(text) - (columns - 3 - head) :]}"


def table(rows: Iterable[tuple[str, ...]], indent: str = "  ") -> list[str]:
    """Columns as wide as their widest cell; the last column is cut at the end of the page."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]) - 1)]
    lines = []
    for *cells, last in rows:
        start = indent + "".join(f"{cell:<{width}}  " for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{start}{shorten(last, WIDTH - len(start))}".rstrip())
    return lines


def format_bytes(number: float) -> str:
    """For example ``380 MB``, in powers of ten."""
    for unit in ("bytes", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} bytes" if unit == "bytes" else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} GB"
