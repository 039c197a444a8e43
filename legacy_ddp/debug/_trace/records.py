"""The lines of a trace: encoding with a checksum, a record for each kind of line, and the writer of the file of a rank.

A line is a JSON object whose last two keys are the line number and a checksum. A line with the right checksum is what
a recorder wrote: its members are not checked one by one. docs/trace-format.md describes every line; a change of their
meaning needs a new ``VERSION``. Version 2 has metrics in a call, and lines of logged values; version 3 has lines of
operations; version 4 has the parts of a step in a call.

A step has lines for its operations. A declaration has all that is equal from step to step; a sequence has the numbers
of the declarations, and the digests.
"""

import errno
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from legacy_ddp._errors import TraceError
from legacy_ddp._text import plain
from legacy_ddp.debug._operations.operation import Operation, Stage, Value

FORMAT = "legacy_ddp trace"
VERSION = 4
READABLE_VERSIONS = (1, 2, 3, 4)

# The phases of a step in the order of training, with their labels in texts; docs/trace-format.md has the contents.
PHASE_LABELS = {
    "local_gradients": "local gradients",
    "reduced_gradients": "reduced gradients",
    "settings": "settings",
    "optimizer": "optimizer state",
    "parameters": "parameters",
    "buffers": "buffers",
}
PHASES = tuple(PHASE_LABELS)
RANK_FILE = "rank-{:05d}.jsonl"

MAX_INPUTS = 64
MAX_STEP = 10**15  # more than any training takes, and less than the largest step number of a line
NO_OPTIMIZER = "none given"  # the fact "optimizer" of a recorder without an optimizer
NOT_FINITE = ("nan", "inf", "-inf")
FOREIGN = "it has contents that no recorder writes"

_END = re.compile(rb',"at":(\d{1,18}),"crc32":"([0-9a-f]{8})"\}\n')
_LONGEST_END = len(',"at":,"crc32":"12345678"}\n') + 18

T = TypeVar("T")


class DamagedLineError(TraceError):
    """The bytes of a line are not the bytes that a recorder wrote."""


def encode(values: Mapping[str, Any], at: int) -> bytes:
    """The JSON object ``values`` as line number ``at`` of a file (from 1), with the newline."""
    checked = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()[:-1] + f',"at":{at}'.encode()
    return checked + f',"crc32":"{zlib.crc32(checked):08x}"}}\n'.encode()


def parse(line: bytes, read: Callable[[dict[str, Any]], T]) -> T:
    """The JSON object of a line, given to ``read``. ``line`` includes the newline.

    Raises:
        DamagedLineError: the checksum is wrong, or ``read`` fails.
    """
    split_checked(line)
    try:
        return read(json.loads(line))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, StopIteration) as error:
        raise DamagedLineError(f"{FOREIGN} ({type(error).__name__}: {error})") from error


def split_checked(line: bytes) -> tuple[bytes, int]:
    """The bytes of the line before its last two keys, and the line number."""
    if not line.endswith(b"\n"):
        raise DamagedLineError("it is torn")
    end = _END.search(line, max(0, len(line) - _LONGEST_END))
    # The checksum is that of all bytes before its own key: the contents and the line number.
    if not end or zlib.crc32(memoryview(line)[: end.end(1)]) != int(end[2], 16):
        raise DamagedLineError("its checksum is not that of its bytes")
    return line[: end.start()], int(end[1])


def read_record(record: type[T], values: Mapping[str, Any]) -> T:
    """The record of a line. Members with a default value may be missing: older versions lack some."""
    names = [item.name for item in fields(record)]  # type: ignore[arg-type]
    return record(**{name: as_tuples(values[name]) for name in names if name in values})


def as_tuples(value: Any) -> Any:
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Environment:
    """The first line: facts about this rank, and the steps to record.

    ``started``: UTC, ISO 8601. ``job``: 16 hex digits, equal on all ranks of one launcher. ``layout``: 16 hex digits,
    equal for equal parameters and equal settings of the wrapper. ``facts``: versions, threads, flags and settings as
    text. ``parameters``: all names, sorted. ``local_buffers``: names and patterns of buffers that may differ between
    ranks.
    """

    rank: int
    world_size: int
    every: int
    first_step: int
    started: str
    job: str
    layout: str
    facts: Mapping[str, str]
    parameters: tuple[str, ...]
    local_buffers: tuple[str, ...] = ()

    @property
    def start(self) -> int:
        """The step that stands for the state before ``first_step``."""
        return self.first_step - 1

    @property
    def has_optimizer(self) -> bool:
        return self.facts.get("optimizer", NO_OPTIMIZER) != NO_OPTIMIZER

    def to_json(self) -> dict[str, Any]:
        return {"line": "environment", "format": FORMAT, "version": VERSION, **vars(self)}


@dataclass(frozen=True)
class Names:
    """The names of the entries of a phase. A file declares them once, and refers to them by number.

    ``kinds``: dtype and shape of each tensor; empty for a setting.
    """

    phase: str
    names: tuple[str, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Values:
    """The state of a rank in one phase of one step, one entry per name.

    ``words``: digest of a tensor (16 hex digits), or text of a setting; None for a missing gradient. ``norms``: 2-norm
    of the finite elements of a tensor; None without a norm. ``nonfinite``: number of NaN or infinite elements, by
    position, without zeros.
    """

    words: tuple[str | None, ...]
    norms: tuple[float | None, ...]
    nonfinite: Mapping[int, int] = field(default_factory=dict)

    def to_json(self, step: int, phase: str, number: int) -> dict[str, Any]:
        # The order of keys is part of the format: a reader compares lines without parsing them.
        values = {"words": self.words, "norms": self.norms, "nonfinite": [*self.nonfinite.items()]}
        return {"line": "values", "step": step, "phase": phase, "names": number, **values}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Values":
        return Values(tuple(values["words"]), tuple(values["norms"]), dict(values["nonfinite"]))


@dataclass(frozen=True)
class Section:
    """:class:`Values` with their :class:`Names`."""

    names: Names
    values: Values

    @property
    def norms(self) -> dict[str, float | None]:
        return dict(zip(self.names.names, self.values.norms, strict=True))

    @property
    def nonfinite(self) -> dict[str, int]:
        return {self.names.names[index]: count for index, count in self.values.nonfinite.items()}


@dataclass(frozen=True)
class CallFacts:
    """Facts about one call on this rank, known without its tensors.

    ``sample_size``: of this rank, None for a plain call. ``divisor``: of the summed gradients. ``local_norm``,
    ``finite``: of the gradients before the reduction; None if not measured. ``seconds``: wall time of this rank per
    phase. ``seconds_waited``: in this call, for the headers of the other ranks. ``generators``: 16 hex digits for the
    random generators of torch at the beginning of the call. ``inputs``: the first ``MAX_INPUTS`` arguments of the
    forward passes since the last call: dtype and shape of a tensor or type of a number or text, and 64 bits.
    ``forwards``: number of these passes. ``inputs_complete``: no other arguments were passed. ``metrics``: their sums
    over the ranks. ``parts``: seconds of this rank since its last call, as in :class:`RankRow`; empty in a trace of an
    earlier version.
    """

    call: int
    micro_batches: int
    sample_size: int | None
    took_part: bool
    divisor: int
    local_norm: float | None
    finite: bool | None
    payload_bytes: int
    seconds: Mapping[str, float]
    seconds_waited: float
    generators: str
    forwards: int
    inputs: tuple[tuple[str, str], ...]
    inputs_complete: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)

    def to_json(self, step: int) -> dict[str, Any]:
        metrics = {name: plain(value) for name, value in self.metrics.items()}
        return {"line": "call", "step": step, **vars(self), "metrics": metrics}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "CallFacts":
        return read_record(CallFacts, {**values, "metrics": read_numbers(values.get("metrics", {}))})


def read_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`legacy_ddp._text.plain` for each value: ``"nan"`` is NaN."""
    return {name: float(value) if value in NOT_FINITE else value for name, value in values.items()}


def read_environment(values: Mapping[str, Any]) -> Environment:
    """The record of the first line. Raises a TraceError for another format or version."""
    if values.get("line") != "environment" or values.get("format") != FORMAT:
        raise TraceError(f"is no trace: got a first line of another kind, expected one of format {FORMAT!r}")
    if values.get("version") not in READABLE_VERSIONS:
        *others, last = map(str, READABLE_VERSIONS)
        readable = f"{', '.join(others)} or {last}"
        raise TraceError(
            f"is of another version: got {values.get('version')!r}, expected {readable}; read it with the legacy_ddp "
            "that wrote it"
        )
    return read_record(Environment, values)


_DIGITS = 16


@dataclass(frozen=True)
class Declaration:
    """An :class:`Operation` without digests, micro-batch and number.

    ``parameters``: one for each input. ``inputs``, ``outputs``: kind and layout of each tensor. ``digested``: whether
    each of these tensors has a digest. ``is_random``: whether a digest of the generator follows.
    """

    name: str
    stage: Stage
    module: str
    parameters: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    digested: tuple[bool, ...]
    is_random: bool
    settings: str

    def with_digests(self, digests: Iterator[str], micro_batch: int, number: int) -> Operation:
        found = [next(digests) if is_digested else None for is_digested in self.digested]
        values = [Value(*item, digest) for item, digest in zip((*self.inputs, *self.outputs), found, strict=True)]
        return Operation(
            name=self.name,
            stage=self.stage,
            micro_batch=micro_batch,
            module=self.module,
            parameters=self.parameters,
            inputs=tuple(values[: len(self.inputs)]),
            outputs=tuple(values[len(self.inputs) :]),
            settings=self.settings,
            generator=next(digests) if self.is_random else "",
            number=number,
        )


def declaration_of(operation: Operation) -> Declaration:
    values = (*operation.inputs, *operation.outputs)
    return Declaration(
        name=operation.name,
        stage=operation.stage,
        module=operation.module,
        parameters=operation.parameters,
        inputs=tuple([(value.kind, value.layout) for value in operation.inputs]),
        outputs=tuple([(value.kind, value.layout) for value in operation.outputs]),
        digested=tuple([value.digest is not None for value in values]),
        is_random=bool(operation.generator),
        settings=operation.settings,
    )


def digests_of(operation: Operation) -> str:
    """The joined digests of an operation: of inputs, outputs and generator."""
    values = (*operation.inputs, *operation.outputs)
    return "".join([value.digest or "" for value in values]) + operation.generator


def sequence_from_json(values: Mapping[str, Any], declared: Sequence[Declaration], before: int = 0) -> list[Operation]:
    """The operations of one line. ``before``: the number of operations of the step in earlier lines."""
    digests = values["digests"]
    words = (digests[start : start + _DIGITS] for start in range(0, len(digests), _DIGITS))
    held = [declared[number] for number in values["numbers"]]
    return [
        item.with_digests(words, values["micro_batch"], number) for number, item in enumerate(held, start=before + 1)
    ]


class Writer:
    """The file of one rank, from the environment line on. Overwrites nothing."""

    def __init__(self, folder: Path, environment: Environment) -> None:
        self.path = folder / RANK_FILE.format(environment.rank)
        self._declared: dict[type, dict[Names | Declaration, int]] = {Names: {}, Declaration: {}}
        self._lines: list[bytes] = []
        self._line_count = 0
        self._is_whole = True
        self._file = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Not buffered: the kernel has the written bytes, so they survive the process.
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
            self._add(environment.to_json())
            self.flush()
        # "from None": the texts hold all that the errors of the system say.
        except FileExistsError as error:
            if error.filename != str(self.path):
                raise TraceError(
                    f"{folder} is no folder; name another folder, or a path that does not exist yet"
                ) from None
            raise TraceError(
                f"{self.path} exists, expected no trace of this rank there; name another folder, or remove that one"
            ) from None
        except OSError as error:
            self.abandon()
            raise TraceError(f"{self.path} cannot be written: {error.strerror}; name another folder") from None

    def section(self, step: int, section: Section) -> None:
        number = self._declare(section.names)
        self._add(section.values.to_json(step, section.names.phase, number))

    def sections(self, step: int, sections: Iterable[Section]) -> None:
        for section in sections:
            self.section(step, section)

    def call(self, step: int, facts: CallFacts) -> None:
        self._add(facts.to_json(step))

    def operations(self, step: int, operations: Sequence[Operation]) -> None:
        for micro_batch, group in groupby(operations, key=lambda operation: operation.micro_batch):
            found = list(group)
            numbers = [self._declare(declaration_of(operation)) for operation in found]
            digests = "".join(map(digests_of, found))
            values = {"step": step, "micro_batch": micro_batch, "numbers": numbers, "digests": digests}
            self._add({"line": "operations", **values})

    def log_now(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write logged values of this rank, and all lines before."""
        logged = {name: plain(value) for name, value in values.items()}
        self._add({"line": "log", "step": step, "values": logged})
        self.flush()

    def flush(self) -> None:
        """Write all added lines to the file, in one piece.

        Raises:
            OSError: this write or an earlier one failed, and the file ends with a torn line; or the file was deleted.
        """
        if os.fstat(self._file).st_nlink == 0:  # the kernel would accept the lines nevertheless
            raise OSError(errno.ENOENT, "the file was deleted", str(self.path))
        pending = memoryview(b"".join(self._lines))
        self._lines.clear()
        if not self._is_whole:
            raise OSError(errno.EIO, "an earlier line of the trace was not written whole", str(self.path))
        self._is_whole = False
        while pending:
            pending = pending[os.write(self._file, pending) :]
        self._is_whole = True

    def close(self, step: int, reason: str) -> None:
        """Write the end line and close the file. Closes it also if the line cannot be written.

        ``step``: the last step. ``reason``: ``closed``, or the name of an exception.
        """
        try:
            self._add({"line": "end", "step": step, "reason": reason})
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without an end line; may be called again."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def discard(self) -> None:
        self.abandon()
        self.path.unlink(missing_ok=True)

    def _declare(self, record: Names | Declaration) -> int:
        """The number by which later lines refer to a record. Adds its line at the first use."""
        declared = self._declared[type(record)]
        number = declared.get(record)
        if number is None:
            number = declared[record] = len(declared)
            line = "names" if isinstance(record, Names) else "operation"
            self._add({"line": line, "number": number, **vars(record)})
        return number

    def _add(self, values: Mapping[str, Any]) -> None:
        self._lines.append(encode(values, self._line_count + 1))
        self._line_count += 1
