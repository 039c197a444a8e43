"""Text on a page of 80 columns, values as JSON has them, and texts of exceptions. Pure.

Names and texts that are not of this library go to terminals, logs, files and messages to other ranks: the name of a
host, of a module or a parameter, the text of an exception. They may hold escape sequences, newlines, marks that change
the direction of the text, and lone surrogates of file names that are no UTF-8. :func:`printable` makes escapes of them,
and every text passes through it on its way out. The text of an exception may also be megabytes, and its ``__str__``
may raise: here it gets a bounded length.
"""

import errno
import math
import re
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 80
TIE = "\N{NO-BREAK SPACE}"
# Characters. A rank quotes the text of every failed rank, and a watchdog's message may have 2**20 bytes.
MAX_LINE, MAX_TEXT = 1_000, 8_000
_NUMBER_AT_END = re.compile(r"\((\d{1,4})\)$")
_LINE_END = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")  # as for str.splitlines()
_LIMITS = {
    errno.EMFILE: "the limit of open files of this process is reached; raise it with ulimit -n",
    errno.ENFILE: "the limit of open files of this machine is reached; raise the sysctl fs.file-max",
    errno.ETOOMANYREFS: "too many open files of this user are on their way; raise the limit with ulimit -n",
}


def printable(text: str) -> str:
    """The text in one line, with escapes for newlines, control characters and other unprintable characters."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable_lines(text: str) -> str:
    """The text with every line printable. For a text of this library, whose parts of other origin have no newlines."""
    return "\n".join(map(printable, text.replace("\r\n", "\n").split("\n")))


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


def first_few(texts: Sequence[object], limit: int, more: str = "... {} more") -> list[str]:
    """The first ``limit`` texts, and ``more`` with the number of the others, if there are others."""
    others = len(texts) - limit
    return [*map(str, texts[:limit]), *([more.format(others)] if others > 0 else [])]


def list_some(texts: Sequence[str], limit: int = 3) -> str:
    """The first ``limit`` texts, and the number of the others: ``a, b, c and 2 more``."""
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more


def format_bytes(number: float) -> str:
    """For example ``380 MB``, in powers of ten."""
    for unit in ("bytes", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} bytes" if unit == "bytes" else f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} GB"


def how_to_explain(name: str) -> str:
    """The last line of an error or a warning: the command that prints the section ``name`` of docs/errors.md."""
    return f"meaning and next step: legacy-ddp explain {name}"


def error_text(error: BaseException) -> str:
    """Type and text: ``ValueError: text``; the type alone without a text. Never raises."""
    return _cut(_with_type(error, _text_of(error)), MAX_TEXT)


def error_line(error: BaseException) -> str:
    """Type and first line: ``ValueError: first line``; the type alone without a text. Never raises.

    Without the colon in front of further lines.
    """
    return _with_type(error, first_line(error).removesuffix(":"))


def system_error_text(error: OSError | RuntimeError) -> str:
    """Why a system call failed, in a line: for one cause one text, whichever call met it. Never raises.

    torch has a RuntimeError for a failed call, with the number of the error in brackets at the end.
    """
    at_end = _NUMBER_AT_END.search(first_line(error))
    number = error.errno if isinstance(error, OSError) else at_end and int(at_end[1])
    return _LIMITS.get(number or 0) or error_line(error)


def first_line(error: BaseException) -> str:
    """The first line of the text that is not blank. Never raises."""
    return _cut(_LINE_END.split(_text_of(error).lstrip(), maxsplit=1)[0], MAX_LINE)


def _with_type(error: BaseException, text: str) -> str:
    kind = printable(type(error).__name__)
    return f"{kind}: {text}" if text.strip() else kind


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001 - __str__ is the user's code
        return f"(no text: its __str__ raised {type(problem).__name__})"


def _cut(text: str, limit: int) -> str:
    more = f" ... ({len(text) - limit:,} more characters)" if len(text) > limit else ""
    return printable_lines(text[:limit]) + more
