"""Opening of the file of one rank, and its first line."""

import os
import stat
from io import BufferedReader
from pathlib import Path

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._trace.line_format import DamagedLineError, decode
from legacy_ddp.debug._trace.records import Environment, check_version

_FIRST = b'{"line":"environment","format":'


def open_trace(path: Path) -> BufferedReader:
    """The file, opened for reading.

    Raises:
        TraceError: the file cannot be opened, or is a pipe.
    """
    try:
        file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115 - the caller closes the file
    except OSError as error:
        raise TraceError(unreadable(path, error)) from error
    if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
        file.close()
        raise TraceError(f"{path} is a pipe, expected a file; save its output to a file")
    return file


def _open_without_waiting(path: str, flags: int) -> int:
    """Opening a pipe would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def unreadable(path: Path, error: OSError) -> str:
    return f"{path} cannot be read: {error.strerror}"


def first_line(path: Path, file: BufferedReader) -> tuple[Environment, int]:
    """The environment at the beginning of a file, and the length of the line in bytes.

    Raises:
        TraceError: the file begins with another line; the text names the file.
    """
    try:
        beginning = file.peek(len(_FIRST))
    except OSError as error:
        raise TraceError(unreadable(path, error)) from error
    if not beginning:
        raise TraceError(f"{path} is empty, expected a trace; was the run killed before its first step?")
    if not beginning.startswith(_FIRST):  # checked before readline(): junk may be one line of any length
        raise TraceError(f"{path} is no trace: its first line is not what a recorder writes")
    line = file.readline()
    try:
        values = decode(line)
        check_version(values)
        return Environment.from_json(values), len(line)
    except DamagedLineError as error:
        raise TraceError(f"{path}: line 1 is damaged: {error}") from error
    except TraceError as error:
        raise TraceError(f"{path} {error}") from error
