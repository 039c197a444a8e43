"""Texts of exceptions for reports, files and other ranks: of bounded length, and always valid UTF-8. Pure.

The text of a user's exception may be megabytes, may hold a file name that is no UTF-8, and its ``__str__`` may raise.
"""

import errno
import re

from legacy_ddp._text import encodable

# Characters. A rank quotes the text of every failed rank, and a watchdog's message may have 2**20 bytes.
MAX_LINE, MAX_TEXT = 1_000, 8_000
_NUMBER_AT_END = re.compile(r"\((\d{1,4})\)$")
_LIMITS = {
    errno.EMFILE: "the limit of open files of this process is reached; raise it with ulimit -n",
    errno.ENFILE: "the limit of open files of this machine is reached; raise the sysctl fs.file-max",
    errno.ETOOMANYREFS: "too many open files of this user are on their way; raise the limit with ulimit -n",
}
_LINE_END = re.compile(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")  # as for str.splitlines()


def how_to_explain(name: str) -> str:
    """The last line of an error: the command that prints the section ``name`` of docs/errors.md."""
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
    kind = type(error).__name__
    return f"{kind}: {text}" if text.strip() else kind


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001 - __str__ is the user's code
        return f"(no text: its __str__ raised {type(problem).__name__})"


def _cut(text: str, limit: int) -> str:
    more = f" ... ({len(text) - limit:,} more characters)" if len(text) > limit else ""
    return encodable(text[:limit]) + more
