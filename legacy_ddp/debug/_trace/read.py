"""Readers of a trace: the file of one rank, and the folder of a run."""

import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from legacy_ddp._errors import TraceError
from legacy_ddp._text import MAX_LINES, first_few, list_some, name_ranks
from legacy_ddp.debug._operations.operation import Operation
from legacy_ddp.debug._trace.records import (
    FOREIGN,
    PHASE_LABELS,
    PHASES,
    RANK_FILE,
    CallFacts,
    DamagedLineError,
    Declaration,
    Environment,
    Names,
    Section,
    Values,
    parse,
    read_environment,
    read_numbers,
    read_record,
    sequence_from_json,
    split_checked,
)

_FIRST = b'{"line":"environment","format":'
_VALUES = re.compile(rb'\{"line":"values","step":(\d{1,18}),"phase":"(\w{1,20})","names":(\d{1,18}),"words":')
_CALL = re.compile(rb'\{"line":"call","step":(\d{1,18}),')
_ALL_FINITE = b',"nonfinite":[]'
_COLUMNS = (*PHASES, "call")
_ABSENT = -1

T = TypeVar("T")


class RankTrace:
    """The file of one rank, up to its end or to the first damaged line.

    The constructor scans the file once; the methods read single lines again. With ``until`` it scans only up to the
    first line of a step after ``until``, and the attributes are about this part.

    ``steps``: all steps with a line, ascending; the start is the step before ``first_step``. ``damage``: number and
    damage of a line, empty for an undamaged file. ``torn``: the last line is incomplete. ``end``: how the recorder's
    block ended (``"closed"``, or the name of an exception), empty if the recorder ended otherwise. ``phases``: the
    phases of any step. ``nonfinite``: first step and phase with NaN or infinite elements. ``logged``: values that this
    rank logged, by step. ``operation_counts``: by step, for steps with operations.

    Memory: 260 bytes per step, the logged values, and the declarations of operations. It does not grow with tensors.
    """

    def __init__(self, path: Path, until: int | None = None) -> None:
        self.path = path
        self.nonfinite: tuple[int, str] | None = None
        self.damage = ""
        self.torn = False
        self.end = ""
        self.steps = array("q")
        self.logged: dict[int, dict[str, float | str]] = {}
        self.operation_counts: dict[int, int] = {}
        self._names: dict[int, tuple[Names, bytes]] = {}
        self._declared: list[Declaration] = []
        self._operations: dict[int, list[int]] = {}  # offsets of lines by step
        self._offsets = {column: array("q") for column in _COLUMNS}
        self._digests = {phase: array("q") for phase in PHASES}
        self._numbers = {phase: array("q") for phase in PHASES}
        self._rows: dict[int, int] = {}
        self._file = open_trace(path)
        try:
            self.environment, first_bytes = first_line(path, self._file)
            self._scan(first_bytes, until)
        except BaseException as error:
            self._file.close()
            if isinstance(error, OSError):
                raise TraceError(unreadable(path, error)) from error
            raise

    def __enter__(self) -> "RankTrace":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(phase for phase in PHASES if any(offset != _ABSENT for offset in self._offsets[phase]))

    def declared(self, phase: str) -> tuple[Names, ...]:
        return tuple(names for names, _ in self._names.values() if names.phase == phase)

    def digest(self, step: int, phase: str) -> int | None:
        """64 bits, equal for sections with equal names and equal ``words``; None for a missing section."""
        row = self._row(step, phase)
        return None if row is None else self._digests[phase][row]

    def names(self, step: int, phase: str) -> Names | None:
        """The names of a section, without reading the section; None for a missing section."""
        row = self._row(step, phase)
        return None if row is None else self._names[self._numbers[phase][row]][0]

    def section(self, step: int, phase: str) -> Section | None:
        names, values = self.names(step, phase), self._parsed(step, phase, Values.from_json)
        return None if names is None or values is None else Section(names, values)

    def call(self, step: int) -> CallFacts | None:
        return self._parsed(step, "call", CallFacts.from_json)

    def operations(self, step: int) -> tuple[Operation, ...]:
        found: list[Operation] = []
        for offset in self._operations.get(step, ()):
            read = partial(sequence_from_json, declared=self._declared, before=len(found))
            found += self._parsed_at(step, offset, read)
        return tuple(found)

    def _row(self, step: int, column: str) -> int | None:
        """The index of the step in the arrays; None without a line in this column."""
        row = self._rows.get(step)
        return None if row is None or self._offsets[column][row] == _ABSENT else row

    def _parsed(self, step: int, column: str, read: Callable[[dict[str, Any]], T]) -> T | None:
        row = self._row(step, column)
        return None if row is None else self._parsed_at(step, self._offsets[column][row], read)

    def _parsed_at(self, step: int, offset: int, read: Callable[[dict[str, Any]], T]) -> T:
        try:
            self._file.seek(offset)
            return parse(self._file.readline(), read)
        except OSError as error:
            raise TraceError(unreadable(self.path, error)) from error
        except DamagedLineError as error:
            raise TraceError(f"{self.path}: a line of step {step} cannot be read: {error}") from error

    def _scan(self, offset: int, until: int | None) -> None:
        """Add the lines from ``offset`` on, up to the first damaged line, or to the first line after ``until``."""
        for number, line in enumerate(self._file, start=2):
            try:
                body, at = split_checked(line)
                if at != number:
                    raise DamagedLineError(f"it was written as line {at}")
                self._add_line(line, body, offset)
            except DamagedLineError as error:
                self.torn = not line.endswith(b"\n")
                self.damage = "" if self.torn else f"line {number}: {error}"
                return
            offset += len(line)
            if until is not None and self.steps and self.steps[-1] > until:
                return

    def _add_line(self, line: bytes, body: bytes, offset: int) -> None:
        if self.end:
            raise DamagedLineError("it follows the end of the trace")
        if found := _VALUES.match(body):
            self._add_values(found, body, offset)
        elif found := _CALL.match(body):
            self._add_column(int(found[1]), "call", offset)
        else:
            parse(line, lambda values: self._add_rare_line(values, body, offset))

    def _add_values(self, found: re.Match[bytes], body: bytes, offset: int) -> None:
        step, phase, number = int(found[1]), found[2].decode(), int(found[3])
        names, digest_of_names = self._names.get(number, (None, b""))
        if names is None or names.phase != phase:
            raise DamagedLineError(FOREIGN)
        row = self._add_column(step, phase, offset)
        self._digests[phase][row] = _digest(digest_of_names + body[found.end() : body.rfind(b',"norms":')])
        self._numbers[phase][row] = number
        if self.nonfinite is None and not body.endswith(_ALL_FINITE):
            self.nonfinite = step, phase

    def _add_rare_line(self, values: dict[str, Any], body: bytes, offset: int) -> None:
        kind, step = values["line"], values.get("step", 0)
        if kind == "names":
            contents = body.partition(b',"phase":')[2]  # equal in all files, unlike the number
            names = read_record(Names, values)
            if names.phase not in PHASES:
                raise DamagedLineError(FOREIGN)
            self._names[values["number"]] = names, blake2b(contents, digest_size=8).digest()
        elif kind == "operation":
            self._declared.append(read_record(Declaration, values))
        elif kind == "operations":
            self._add_row(step)
            self._operations.setdefault(step, []).append(offset)
            self.operation_counts[step] = self.operation_counts.get(step, 0) + len(values["numbers"])
        elif kind == "log":
            self._add_row(step)
            self.logged.setdefault(step, {}).update(read_numbers(values["values"]))
        elif kind == "end":
            self.end = values["reason"]
        else:
            raise DamagedLineError("it is of a kind that no recorder writes")

    def _add_column(self, step: int, column: str, offset: int) -> int:
        """Store the offset of a line. Returns the index of the step in the arrays."""
        row = self._add_row(step)
        if self._offsets[column][row] != _ABSENT:
            raise _comes_again(step)
        self._offsets[column][row] = offset
        return row

    def _add_row(self, step: int) -> int:
        """The index of the step in the arrays. Adds a new step; an earlier step than the last is damage."""
        if not self.steps or step > self.steps[-1]:
            self._rows[step] = len(self.steps)
            self.steps.append(step)
            for name in _COLUMNS:
                self._offsets[name].append(_ABSENT)
            for values in (*self._digests.values(), *self._numbers.values()):
                values.append(0)
        row = self._rows.get(step, _ABSENT)
        if row != len(self.steps) - 1:
            raise _comes_again(step)
        return row


def open_trace(path: Path) -> BufferedReader:
    if path.is_fifo():  # opening it would wait for a writer
        raise TraceError(f"{path} is a pipe, expected a file; save its output to a file")
    try:
        return open(path, "rb")
    except OSError as error:
        raise TraceError(unreadable(path, error)) from error


def unreadable(path: Path, error: OSError) -> str:
    return f"{path} cannot be read: {error.strerror}"


def first_line(path: Path, file: BufferedReader) -> tuple[Environment, int]:
    """The environment at the beginning of a file, and the length of the line in bytes."""
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
        return parse(line, read_environment), len(line)
    except DamagedLineError as error:
        raise TraceError(f"{path}: line 1 is damaged: {error}") from error
    except TraceError as error:
        raise TraceError(f"{path} {error}") from error


def _comes_again(step: int) -> DamagedLineError:
    return DamagedLineError(f"step {step} comes again; are these two runs in one file?")


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)


_RANK_FILE = re.compile(r"rank-([0-9]{5,})\.jsonl")
_MAX_GROUPS = 3
KILLED = "killed, still running, or recorder stopped"


@dataclass(frozen=True)
class Run:
    """The trace of one run. ``environments``: in rank order.

    Files are opened on demand: those of a thousand ranks would exceed the limit of a process.
    """

    folder: Path
    environments: tuple[Environment, ...]

    @property
    def world_size(self) -> int:
        return len(self.environments)

    @cached_property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def with_local_buffers(self, patterns: Sequence[str]) -> "Run":
        """The same run, with ``patterns`` added to the buffers that may differ between ranks."""
        changed = (replace(item, local_buffers=(*item.local_buffers, *patterns)) for item in self.environments)
        return replace(self, environments=tuple(changed))

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self.folder / RANK_FILE.format(rank) for rank in range(self.world_size))

    def open(self, rank: int, until: int | None = None) -> RankTrace:
        """The file of one rank, scanned up to step ``until`` if given."""
        return RankTrace(self.paths[rank], until)


def open_run(folder: Path) -> Run:
    """The run with its trace in ``folder``. Files of other names are ignored."""
    found = _rank_files(folder)
    environments = {rank: _settings(path) for rank, path in sorted(found.items())}
    sizes = {environment.world_size for environment in environments.values()}
    if len(sizes) > 1:
        raise TraceError(f"{folder} holds files of several runs: got world sizes {sorted(sizes)}, expected one run")
    size = sizes.pop()
    if missing := sorted(set(range(size)) - set(found)):
        raise TraceError(
            f"{folder} lacks {name_ranks(missing)} of {size}; copy the files of all hosts into one folder "
            "(was a rank killed before its recorder began, or is there a recorder on some ranks only?)"
        )
    if unknown := sorted(set(found) - set(range(size))):
        raise TraceError(
            f"{folder} holds files of several runs: got {name_ranks(unknown)}, expected ranks below {size}"
        )
    for field in ("job", "first_step", "every"):
        if len(values := {getattr(environment, field) for environment in environments.values()}) > 1:
            raise TraceError(f"{folder} holds files of several runs: got {field} {sorted(values)}, expected one value")
    return Run(folder, tuple(environments.values()))


def _rank_files(folder: Path) -> dict[int, Path]:
    try:
        entries = sorted(folder.iterdir())
    except NotADirectoryError as error:
        raise TraceError(f"{folder} is a file, expected the folder that a recorder wrote") from error
    except OSError as error:
        raise TraceError(f"{folder} cannot be read: {error.strerror}; expected a recorder's folder") from error
    numbered = {path: int(match[1]) for path in entries if (match := _RANK_FILE.fullmatch(path.name))}
    found = {rank: path for path, rank in numbered.items() if path.name == RANK_FILE.format(rank)}
    if not found:
        names = [path.name for path in entries]
        got = list_some(names) if names else "nothing"
        raise TraceError(f"{folder} holds no trace: got {got}, expected {RANK_FILE.format(0)} and so on")
    return found


def _settings(path: Path) -> Environment:
    with open_trace(path) as file:
        environment, _ = first_line(path, file)
    if path.name != RANK_FILE.format(environment.rank):
        raise TraceError(f"{path} was renamed: it is the trace of rank {environment.rank}")
    return environment


def end_text(trace: RankTrace) -> str:
    if trace.damage:
        return f"damaged at {trace.damage}"
    if trace.torn:
        return f"{KILLED}; its last line is torn"
    if trace.end in ("", "closed"):
        return trace.end or KILLED
    return f"left by {trace.end}"


class RunCoverage:
    """The recorded steps of one run, and the ends of its files, collected rank by rank.

    ``label``: A or B, empty for a single run. ``recorded``: the steps of any rank. ``damage``: rank and damage of each
    damaged file. ``reasons``: the ``end`` of each file. ``nonfinite``: first step, phase index and rank with NaN or
    infinity. ``operations``: for each step with operations the greatest number of a rank. ``phases``: the ranks that
    recorded each phase. ``ends``: the ranks by the last step (None without steps) and the end of their files.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.recorded: set[int] = set()
        self.damage: list[tuple[int, str]] = []
        self.reasons: set[str] = set()
        self.nonfinite: tuple[int, int, int] | None = None
        self.operations: dict[int, int] = {}
        self.phases: dict[str, list[int]] = {}
        self.ends: dict[tuple[int | None, str], list[int]] = {}
        self._with_operations: dict[frozenset[int], list[int]] = {}  # ranks by their steps with operations
        self._lasts: dict[int, int | None] = {}

    def add(self, rank: int, trace: RankTrace) -> None:
        last = self._lasts[rank] = trace.steps[-1] if trace.steps else None
        self.recorded.update(trace.steps)
        self.ends.setdefault((last, end_text(trace)), []).append(rank)
        self.reasons.add(trace.end)
        self._with_operations.setdefault(frozenset(trace.operation_counts), []).append(rank)
        for step, count in trace.operation_counts.items():
            self.operations[step] = max(count, self.operations.get(step, 0))
        if trace.nonfinite:
            step, phase = trace.nonfinite
            found = step, PHASES.index(phase), rank
            self.nonfinite = min(found, self.nonfinite or found)
        for phase in trace.phases:
            self.phases.setdefault(phase, []).append(rank)
        if trace.damage:
            self.damage.append((rank, f"{RANK_FILE.format(rank)}, {trace.damage}"))

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last step of any rank; None without steps."""
        return (min(self.recorded), max(self.recorded)) if self.recorded else None

    def ended_before(self, step: int) -> list[int]:
        return [rank for rank, last in self._lasts.items() if last is None or last < step]

    @property
    def missing_operations(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Groups of ranks, each with the steps, ascending, in which only other ranks have operations."""
        found = (
            (tuple(ranks), tuple(sorted({*self.operations} - own))) for own, ranks in self._with_operations.items()
        )
        return tuple((ranks, steps) for ranks, steps in found if steps)

    def span(self) -> str:
        """``steps 0-250``, or ``no steps``."""
        return span(self.steps) if self.steps else "no steps"

    def notes(self) -> list[str]:
        """Notes about files without a regular end, ranks with fewer steps or operations, and NaN or infinity."""
        prefix = f"{self.label}: " if self.label else ""
        found = (*self._end_notes(), *self._operation_notes(), *self._nonfinite_notes())
        return [f"{prefix}{note}" for note in found]

    def _end_notes(self) -> list[str]:
        is_even = len({last for last, _ in self.ends}) == 1
        notes = []
        for (last, end), ranks in self.ends.items():
            if end == "closed" and is_even:
                continue
            after = f"after step {last}" if last is not None else "before its first step"
            group = "all ranks" if ranks == [*self._lasts] and len(ranks) > 1 else name_ranks(ranks)
            notes.append(f"{group} ended {after}" + ("" if end == "closed" else f" ({end})"))
        return first_few(notes, _MAX_GROUPS, "{} more ways in which ranks ended")

    def _operation_notes(self) -> list[str]:
        notes = [
            f"operations of {spans(steps)} are missing on {name_ranks(ranks)}"
            for ranks, steps in self.missing_operations
        ]
        return first_few(notes, _MAX_GROUPS, "{} more groups of ranks without operations of other ranks")

    def _nonfinite_notes(self) -> list[str]:
        if self.nonfinite is None:
            return []
        step, phase, rank = self.nonfinite
        return [f"NaN or infinity, first in {PHASE_LABELS[PHASES[phase]]} of step {step} on rank {rank}"]


def spans(steps: Sequence[int]) -> str:
    """Ascending steps as runs of consecutive numbers, ``steps 3-7, step 9``; the first ``MAX_LINES`` of these."""
    starts = [index for index, step in enumerate(steps) if index == 0 or step != steps[index - 1] + 1]
    ends = [start - 1 for start in (*starts[1:], len(steps))]
    found = [span((steps[start], steps[end])) for start, end in zip(starts, ends, strict=True)]
    return ", ".join(first_few(found, MAX_LINES, "... {} more spans of steps"))


def span(steps: tuple[int, int]) -> str:
    """``steps 3-7``, or ``step 3``."""
    first, last = steps
    return f"step {first}" if first == last else f"steps {first}-{last}"
