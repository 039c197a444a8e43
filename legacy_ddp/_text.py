"""How is text laid out on a page of 80 columns? Pure."""

import textwrap
from collections.abc import Iterable

WIDTH = 80


def printable(text: str) -> str:
    """The text with escapes for what moves a cursor or cannot be printed: a trace may hold anything."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def encodable(text: str) -> str:
    """The text with escapes for what UTF-8 cannot hold: lone surrogates, as file names that are no UTF-8 have them."""
    return text.encode(errors="backslashreplace").decode()


def wrap(text: str, indent: str = "", deeper: str = "  ") -> list[str]:
    """Lines of at most ``WIDTH`` columns; what does not fit is continued deeper, and only broken if it must be."""
    return textwrap.wrap(
        printable(text),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + deeper,
        break_long_words=True,
        break_on_hyphens=False,
    )


def shorten(text: str, columns: int) -> str:
    """The text, or its beginning and end if it is longer."""
    text = printable(text)
    if len(text) <= columns:
        return text
    head = (columns - 3) // 2
    return f"{text[:head]}...{text[len(text) - (columns - 3 - head) :]}"


def table(rows: Iterable[tuple[str, ...]], indent: str = "  ") -> list[str]:
    """Columns as wide as their widest cell, the last one cut where the page ends."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]) - 1)]
    lines = []
    for *cells, last in rows:
        start = indent + "".join(f"{cell:<{width}}  " for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{start}{shorten(last, WIDTH - len(start))}".rstrip())
    return lines


def format_bytes(number: float) -> str:
    """``380 MB``; in powers of ten."""
    for unit in ("bytes", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} bytes" if unit == "bytes" else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} GB"
