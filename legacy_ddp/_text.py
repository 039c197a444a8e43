"""Text on a page of 80 columns, texts of exceptions, and rows of ranks with their differences. Pure.

Names of hosts, modules and parameters and texts of exceptions go to terminals, logs, files and messages to other ranks.
They may hold escape sequences, newlines, marks that change the direction of the text, and lone surrogates of file names
that are no UTF-8. Every text therefore passes through :func:`printable` before it is shown or sent. The text of an
exception may also be megabytes, and its ``__str__`` may raise.
"""

import errno
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

WIDTH = 80
TIE = "\N{NO-BREAK SPACE}"
# In characters. A rank quotes the text of every failed rank, and a watchdog's message may have 2**20 bytes.
MAX_LINE, MAX_TEXT = 1_000, 8_000
_NUMBER_AT_END = re.compile(r"\((\d{1,4})\)$")
_LINE_END = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")  # as for str.splitlines()
# torch._utils.ExceptionWrapper; the line is the last one that begins with the error.
_OF_WORKER = re.compile(
    r"Caught (\w+) (?P<where>[^\n]*)\.\nOriginal Traceback .*\n(?P<line>(?:[\w.]+\.)?\1\b[^\n]*)", re.DOTALL
)
_LIMITS = {
    errno.EMFILE: "the limit of open files of this process is reached; raise it with ulimit -n",
    errno.ENFILE: "the limit of open files of this machine is reached; raise the sysctl fs.file-max",
    errno.ETOOMANYREFS: "too many open files of this user are on their way; raise the limit with ulimit -n",
}
# Of the differences between ranks.
MISSING = "nothing"
MAX_LINES = 10
MAX_SIDES = 4
_Value = TypeVar("_Value")


def printable(text: str) -> str:
    """The text in one line, with escapes for newlines, control characters and other unprintable characters."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def printable_lines(text: str) -> str:
    """The text with every line printable. For a text of this library, whose foreign parts are in one line each."""
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

    ``break_words``: false leaves the line of a longer word too long. ``ties``: every ``TIE`` in the text becomes a
    space at which no line ends.
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
    """The text, or the beginning and the end of a text longer than ``columns``."""
    text = printable(text)
    if len(text) <= columns:
        return text
    head = (columns - 3) // 2
    return f"{text[:head]}...{text[len(text) - (columns - 3 - head) :]}"


def table(rows: Iterable[tuple[str, ...]], indent: str = "  ") -> list[str]:
    """Lines with columns as wide as their widest cell; the last column is cut at the end of the page."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]) - 1)]
    lines = []
    for *cells, last in rows:
        start = indent + "".join(f"{cell:<{width}}  " for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{start}{shorten(last, WIDTH - len(start))}".rstrip())
    return lines


def first_few(texts: Sequence[object], limit: int, more: str = "... {} more") -> list[str]:
    """The first ``limit`` texts, and ``more`` with the number of the others, if any."""
    others = len(texts) - limit
    return [*map(str, texts[:limit]), *([more.format(others)] if others > 0 else [])]


def listed(nouns: Sequence[str]) -> str:
    """``settings, dtypes and shapes``."""
    *others, last = nouns
    return f"{', '.join(others)} and {last}" if others else last


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
    """``ValueError: text``; the type alone without a text. Never raises."""
    return _cut(_with_type(error, _text_of(error)), MAX_TEXT)


def error_line(error: BaseException) -> str:
    """``ValueError: first line``; the type alone without a text. Never raises.

    Of the error of a worker, which torch raises again: ``ValueError: bad batch (in DataLoader worker process 0)``.
    """
    if worker := _OF_WORKER.match(_text_of(error)):
        return _cut(f"{worker['line']} ({worker['where']})", MAX_LINE)
    return _with_type(error, first_line(error).removesuffix(":"))


def system_error_text(error: OSError | RuntimeError) -> str:
    """Why a system call failed, in a line: the same text for a cause, in whichever call it occurs. Never raises."""
    # torch raises a RuntimeError, with the number of the error in brackets at the end.
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


@dataclass(frozen=True)
class Difference:
    """An item that differs between ranks. ``holders``: each value and its ranks, most ranks first."""

    name: str
    holders: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks outside the strict majority; empty without a majority."""
        return outside_majority([ranks for _, ranks in self.holders])

    @property
    def sides(self) -> str:
        """The groups of ranks with equal values, the smallest first, as in ``rank 1 against ranks 0, 2``."""
        groups = [name_ranks(ranks) for _, ranks in reversed(self.holders)]
        if len(groups) > 2 and all(len(ranks) == 1 for _, ranks in self.holders):
            return "every rank has its own"
        return " against ".join(first_few(groups, MAX_SIDES, "{} more groups"))

    def __str__(self) -> str:
        # The smallest group first: the reader looks for it.
        parts = [f"{name_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} {value}" for value, ranks in self.holders]
        return f"{self.name}: {'; '.join(reversed(parts))}"


@dataclass(frozen=True)
class Finding:
    """All differences between the rows; false if there are none."""

    differences: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return bool(self.differences)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The suspects of all differences."""
        return tuple(sorted({rank for difference in self.differences for rank in difference.suspects}))

    def __str__(self) -> str:
        return "\n".join(f"  {line}" for line in first_few(self.differences, MAX_LINES))


def compare_rows(rows: Sequence[Mapping[str, str]], ranks: Sequence[int] | None = None) -> Finding:
    """Compare the rows item by item. An item that is missing in a row has the value ``nothing`` there.

    ``rows[i]``: item -> value, of rank i, or of ``ranks[i]`` if given. Differences are in the order in which the items
    first appear.
    """
    if rows and rows.count(rows[0]) == len(rows):  # the usual case, in little time
        return Finding(())
    of_ranks = range(len(rows)) if ranks is None else ranks
    return compare_groups([(row, (rank,)) for row, rank in zip(rows, of_ranks, strict=True)])


def compare_groups(groups: Sequence[tuple[Mapping[str, str], Sequence[int]]]) -> Finding:
    """As :func:`compare_rows`. ``groups``: each row once, with the ranks that have the row."""
    differences = []
    for name in dict.fromkeys(name for row, _ in groups for name in row):
        values = [row.get(name, MISSING) for row, _ in groups]
        if values.count(values[0]) < len(values):
            differences.append(Difference(name, _merge(zip(values, (ranks for _, ranks in groups), strict=True))))
    return Finding(tuple(differences))


def group_ranks(
    values: Sequence[_Value], ranks: Sequence[int] | None = None
) -> tuple[tuple[_Value, tuple[int, ...]], ...]:
    """Each value with its ranks, most ranks first; with equal numbers, the lowest rank first.

    ``values[i]``: of rank i, or of ``ranks[i]`` if given.
    """
    of_ranks = range(len(values)) if ranks is None else ranks
    return _merge((value, (rank,)) for value, rank in zip(values, of_ranks, strict=True))


def _merge(groups: Iterable[tuple[_Value, Sequence[int]]]) -> tuple[tuple[_Value, tuple[int, ...]], ...]:
    """Each value with the ranks of all its groups, in the order of :func:`group_ranks`."""
    holders: dict[_Value, list[int]] = {}
    for value, ranks in groups:
        holders.setdefault(value, []).extend(ranks)
    sorted_holders = [(value, tuple(sorted(ranks))) for value, ranks in holders.items()]
    return tuple(sorted(sorted_holders, key=lambda item: (-len(item[1]), item[1])))


def outside_majority(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ranks of all groups but the first, the largest; empty if at most half of all ranks are in the largest."""
    others = sorted(rank for group in groups[1:] for rank in group)
    return tuple(others) if len(groups[0]) > len(others) else ()


def name_ranks(ranks: Iterable[int]) -> str:
    """For example ``rank 3`` or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {text}" if len(spans) == 1 and spans[0][0] == spans[0][1] else f"ranks {text}"
