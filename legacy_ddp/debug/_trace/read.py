"""What does one rank's file say? Looked through once; what a step held is read when asked for."""

import json
import os
import re
import stat
from array import array
from collections.abc import Callable
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import Any

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._trace.line_format import PHASES, DamagedLineError, check, decode
from legacy_ddp.debug._trace.records import CallFacts, Environment, Names, Section, Values, check_version, end_reason

_FIRST = b'{"line":"environment","format":'
_VALUES = re.compile(rb'\{"line":"values","step":(\d{1,18}),"phase":"(\w{1,20})","names":(\d{1,18}),"words":')
_CALL = re.compile(rb'\{"line":"call","step":(\d{1,18}),')
_ALL_FINITE = b',"nonfinite":[]'
_COLUMNS = (*PHASES, "call")
_ABSENT = -1

Progress = Callable[[int], object]


class RankTrace:
    """One rank's file, up to its end or to the first line that is not what was written.

    ``steps``: those with any line, ascending; the one before ``first_step`` is the start. ``damage``: which line is
    damaged and how, empty if none is. ``torn``: the last line is not whole. ``end``: how the recorder's block was left
    (``"closed"``, or the name of an exception), empty if it was not: killed, or still running. ``phases``: those that
    any step has. ``nonfinite``: first step and phase with elements that are NaN or infinite. With ``until``, all of
    these are of what was read: up to the first line of a step after that one.

    Memory grows with the number of steps, 260 bytes each, and not with that of tensors.

    Raises:
        TraceError: it cannot be read, or is no trace of this version.
    """

    def __init__(self, path: Path, progress: Progress = lambda _: None, until: int | None = None) -> None:
        self.path = path
        self.nonfinite: tuple[int, str] | None = None
        self.damage = ""
        self.torn = False
        self.end = ""
        self.steps = array("q")
        self._names: dict[int, tuple[Names, bytes]] = {}
        self._offsets = {column: array("q") for column in _COLUMNS}
        self._words = {phase: array("q") for phase in PHASES}
        self._numbers = {phase: array("q") for phase in PHASES}
        self._rows: dict[int, int] = {}
        self._file = open_trace(path)
        try:
            self.environment, first_bytes = first_line(path, self._file)
            self.size_bytes = os.fstat(self._file.fileno()).st_size
            self._look_through(first_bytes, progress, until)
        except BaseException as error:
            self._file.close()
            if isinstance(error, OSError):
                raise TraceError(_unreadable(path, error)) from error
            raise

    def __enter__(self) -> "RankTrace":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(phase for phase in PHASES if any(offset != _ABSENT for offset in self._offsets[phase]))

    def declared(self, phase: str) -> tuple[Names, ...]:
        """What the entries of a phase are called, once more for each time that this changed."""
        return tuple(names for names, _ in self._names.values() if names.phase == phase)

    def word(self, step: int, phase: str) -> int | None:
        """64 bits that are equal where names and words of a section are; None if it has none."""
        row = self._rows.get(step)
        if row is None or self._offsets[phase][row] == _ABSENT:
            return None
        return self._words[phase][row]

    def names(self, step: int, phase: str) -> Names | None:
        """What the entries of a phase of a step are called, without reading them; None if it has none."""
        if self.word(step, phase) is None:
            return None
        return self._names[self._numbers[phase][self._rows[step]]][0]

    def section(self, step: int, phase: str) -> Section | None:
        """What was held in a phase of a step; None if that is not in the trace.

        Raises:
            TraceError: the line says something that no recorder writes.
        """
        members = self._members(step, phase)
        if members is None:
            return None
        names = self._reading(self._names_of, members, phase)
        return Section(names, self._reading(Values.of, members, len(names.names)))

    def words(self, step: int, phase: str) -> list[Any]:
        """The words of a section alone, as it lists them: a fraction of what reading all of it takes.

        Raises:
            TraceError: as :meth:`section`.
        """
        line = self._line(step, phase) or b""
        found, end = _VALUES.match(line), line.rfind(b',"norms":')
        names = self.names(step, phase)
        try:
            words = json.loads(line[found.end() : end]) if found else None
        except (ValueError, RecursionError):
            words = None
        if names is None or not isinstance(words, list) or len(words) != len(names.names):
            raise TraceError(f"{self.path}: a line of step {step} says what no recorder writes: its words are no list")
        return words

    def call(self, step: int) -> CallFacts | None:
        """The host's side of a step's call; None if that is not in the trace.

        Raises:
            TraceError: as :meth:`section`.
        """
        members = self._members(step, "call")
        return None if members is None else self._reading(CallFacts.of, members)

    def _members(self, step: int, column: str) -> dict[str, Any] | None:
        line = self._line(step, column)
        try:
            return None if line is None else decode(line)
        except DamagedLineError as error:
            raise TraceError(f"{self.path}: a line of step {step} cannot be read: {error}") from error

    def _line(self, step: int, column: str) -> bytes | None:
        row = self._rows.get(step)
        if row is None or self._offsets[column][row] == _ABSENT:
            return None
        try:
            self._file.seek(self._offsets[column][row])
            return self._file.readline()
        except OSError as error:
            raise TraceError(_unreadable(self.path, error)) from error

    def _names_of(self, members: dict[str, Any], phase: str) -> Names:
        # A member that comes twice is the last of the two for JSON, the first for who looks through lines.
        number = members["names"]
        if type(number) is not int or number not in self._names or self._names[number][0].phase != phase:
            raise TraceError("says what no recorder writes: member 'names' is not a number declared for that phase")
        return self._names[number][0]

    def _reading(self, read: Callable[..., Any], *args: Any) -> Any:
        try:
            return read(*args)
        except TraceError as error:
            raise TraceError(f"{self.path}: a line {error}") from error

    def _look_through(self, offset: int, progress: Progress, until: int | None) -> None:
        progress(offset)
        for number, line in enumerate(self._file, start=2):
            try:
                body, at = check(line)
                if at != number:
                    raise DamagedLineError(f"it was written as line {at}")
                self._take(line, body, offset)
            except TraceError as error:
                self.torn = not line.endswith(b"\n")
                self.damage = "" if self.torn else f"line {number}: {error}"
                return
            offset += len(line)
            progress(len(line))
            if until is not None and self.steps and self.steps[-1] > until:
                return

    def _take(self, line: bytes, body: bytes, offset: int) -> None:
        if self.end:
            raise DamagedLineError("it follows the end of the trace")
        if found := _VALUES.match(body):
            step, phase, number = int(found[1]), found[2].decode(), int(found[3])
            norms = body.rfind(b',"norms":')
            if phase not in PHASES or number not in self._names or norms < 0 or self._names[number][0].phase != phase:
                raise DamagedLineError("it says what no recorder writes")
            row = self._row(step, phase, offset)
            self._words[phase][row] = _hash_of(self._names[number][1] + body[found.end() : norms])
            self._numbers[phase][row] = number
            if self.nonfinite is None and not body.endswith(_ALL_FINITE):
                self.nonfinite = step, phase
        elif found := _CALL.match(body):
            self._row(int(found[1]), "call", offset)
        else:
            self._take_rare(decode(line), body)

    def _take_rare(self, members: dict[str, Any], body: bytes) -> None:
        if members.get("line") == "names":
            number, names = Names.of(members)
            if number != len(self._names):
                raise DamagedLineError("its number is not the next one")
            self._names[number] = names, blake2b(body.partition(b',"phase":')[2], digest_size=8).digest()
        elif members.get("line") == "end":
            self.end = end_reason(members)
        else:
            raise DamagedLineError("it is of a kind that no recorder writes")

    def _row(self, step: int, column: str, offset: int) -> int:
        """Where the arrays have that step, with the place of one more of its lines."""
        if not self.steps or step > self.steps[-1]:
            self._rows[step] = len(self.steps)
            self.steps.append(step)
            for name in _COLUMNS:
                self._offsets[name].append(_ABSENT)
            for values in (*self._words.values(), *self._numbers.values()):
                values.append(0)
        row = self._rows.get(step, _ABSENT)
        if row != len(self.steps) - 1 or self._offsets[column][row] != _ABSENT:
            raise DamagedLineError(f"step {step} comes again; are these two runs in one file?")
        self._offsets[column][row] = offset
        return row


def open_trace(path: Path) -> BufferedReader:
    """Raises TraceError: it cannot be opened, or is no plain file."""
    try:
        file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - whoever asked closes it
    except OSError as error:
        raise TraceError(_unreadable(path, error)) from error
    if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
        file.close()
        raise TraceError(f"{path} is a pipe, expected a file; save what comes out of it")
    return file


def _without_waiting(path: str, flags: int) -> int:
    """A pipe would wait for somebody to write."""
    return os.open(path, flags | os.O_NONBLOCK)


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path} cannot be read: {error.strerror}"


def first_line(path: Path, file: BufferedReader) -> tuple[Environment, int]:
    """The environment that a file begins with, and the length of its line in bytes.

    Raises:
        TraceError: it begins with something else; the text names the file.
    """
    try:
        beginning = file.peek(len(_FIRST))
    except OSError as error:
        raise TraceError(_unreadable(path, error)) from error
    if not beginning:
        raise TraceError(f"{path} is empty, expected a trace; was the run killed before its first step?")
    if not beginning.startswith(_FIRST):  # before the line is read: junk may be one line of any length
        raise TraceError(f"{path} is no trace: its first line is not what a recorder writes")
    line = file.readline()
    try:
        members = decode(line)
        check_version(members)
        return Environment.of(members), len(line)
    except DamagedLineError as error:
        raise TraceError(f"{path}: line 1 is damaged: {error}") from error
    except TraceError as error:
        raise TraceError(f"{path} {error}") from error


def _hash_of(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
