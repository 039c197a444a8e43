"""The lines of a trace: encoding with a checksum, checks of every field, and a record for each kind of line. Pure.

A line is a JSON object whose last two keys are the line number and a checksum. docs/trace-format.md describes every
line; a change of their meaning needs a new ``VERSION``. Version 2 has metrics in a call, and lines of logged values;
version 3 has lines of operations; version 4 has the parts of a step in a call.
"""

import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from legacy_ddp._errors import TraceError
from legacy_ddp._text import plain

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
MAX_WORLD_SIZE = 2**20  # for a file with a larger number, a reader would list all ranks without a file
NO_OPTIMIZER = "none given"  # the fact "optimizer" of a recorder without an optimizer
NOT_FINITE = ("nan", "inf", "-inf")
FOREIGN = "has contents that no recorder writes"

_END = re.compile(rb',"at":(\d{1,18}),"crc32":"([0-9a-f]{8})"\}\n')
_LONGEST_END = len(',"at":,"crc32":"12345678"}\n') + 18

T = TypeVar("T")
Convert = Callable[[Any], T]  # raises TypeError, ValueError or OverflowError for a value of the wrong type


class DamagedLineError(TraceError):
    """The bytes of a line are not the bytes that a recorder wrote."""


def encode(values: Mapping[str, Any], at: int) -> bytes:
    """The JSON object ``values`` as line number ``at`` of a file (from 1), with the newline."""
    checked = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()[:-1] + f',"at":{at}'.encode()
    return checked + f',"crc32":"{zlib.crc32(checked):08x}"}}\n'.encode()


def decode(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; ``line`` includes the newline.

    Raises:
        DamagedLineError: as :func:`split_checked`.
    """
    split_checked(line)
    try:
        values: dict[str, Any] = json.loads(line)  # the checked end of the line is the end of an object
    except (ValueError, RecursionError) as error:
        raise DamagedLineError(f"it is no JSON ({error})") from error
    return values


def split_checked(line: bytes) -> tuple[bytes, int]:
    """The bytes of the line before its last two keys, and the line number.

    The checksum is that of all bytes before its own key: the contents and the line number.

    Raises:
        DamagedLineError: the line is torn, or the checksum does not match the bytes.
    """
    if not line.endswith(b"\n"):
        raise DamagedLineError("it is torn")
    end = _END.search(line, max(0, len(line) - _LONGEST_END))
    if not end or zlib.crc32(memoryview(line)[: end.end(1)]) != int(end[2], 16):
        raise DamagedLineError("its checksum is not that of its bytes")
    return line[: end.start()], int(end[1])


def read_fields(record: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of the dataclass ``record``, taken by name from the JSON object ``values``.

    A field annotated with ``Annotated[type, convert]`` is converted by ``convert``.

    Raises:
        TraceError: as :func:`read_field`.
    """
    return {name: read_field(values, name, convert) for name, convert in _converters(record).items()}


def read_field(values: Mapping[str, Any], name: str, convert: Convert[T], size: int | None = None) -> T:
    """The converted value of one key. ``size``: the expected length of a sequence.

    Raises:
        TraceError: the key is missing, or the value has the wrong type or length.
    """
    try:
        value = convert(values[name])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{FOREIGN}: key {name!r} is missing or of the wrong type") from error
    if size is not None and isinstance(value, tuple) and len(value) != size:
        raise TraceError(f"{FOREIGN}: key {name!r} has {len(value)} entries, expected {size}, one per name")
    return value


@cache
def _converters(record: type) -> dict[str, Convert[Any]]:
    return {name: _converter(hint) for name, hint in get_type_hints(record, include_extras=True).items()}


def _converter(hint: Any) -> Convert[Any]:
    """The conversion for an annotation of a field."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return arguments[1]  # type: ignore[no-any-return]
    if origin in (Union, UnionType):
        present = _converter(arguments[0])
        return lambda value: None if value is None else present(value)
    if origin is tuple and arguments[1] is not ...:
        return pair_of(_converter(arguments[0]), _converter(arguments[1]))
    if origin is tuple:
        return sequence_of(_converter(arguments[0]))
    if origin is Mapping:
        return mapping_of(_converter(arguments[1]))
    return _OF_TYPE[hint]


def _exactly(kind: type[T]) -> Convert[T]:
    def convert(value: Any) -> T:
        if type(value) is not kind:
            raise TypeError
        return value

    return convert


def count_below(limit: float) -> Convert[int]:
    def convert(value: Any) -> int:
        if type(value) is not int or not 0 <= value < limit:
            raise ValueError
        return value

    return convert


as_text = _exactly(str)
as_count = count_below(math.inf)


def distinct_texts(value: Any) -> tuple[str, ...]:
    names = sequence_of(as_text)(value)
    if len({*names}) < len(names):
        raise ValueError
    return names


def as_phase(value: Any) -> str:
    if value not in PHASES:
        raise ValueError
    return str(value)


def as_digests(value: Any) -> tuple[str | None, ...]:
    return _entries(value, str)


def as_norms(value: Any) -> tuple[float | None, ...]:
    entries = _entries(value, float, int)
    # Python reads 1e999, NaN and Infinity as floats; neither a page nor JSON has a place for them.
    if not all(map(math.isfinite, filter(None, entries))):
        raise ValueError
    if int not in map(type, entries):
        return entries
    return tuple([entry if entry is None else float(entry) for entry in entries])


def sequence_of(convert: Convert[T]) -> Convert[tuple[T, ...]]:
    def converted(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise TypeError
        return tuple(map(convert, value))

    return converted


def pair_of(first: Convert[Any], second: Convert[Any]) -> Convert[tuple[Any, Any]]:
    def converted(value: Any) -> tuple[Any, Any]:
        if not isinstance(value, list):
            raise TypeError
        left, right = value
        return first(left), second(right)

    return converted


def _entries(value: Any, *types: type) -> tuple[Any, ...]:
    """A sequence of these types or None, checked as a whole: a trace holds millions of entries."""
    if not isinstance(value, list) or not {*map(type, value)} <= {*types, type(None)}:
        raise TypeError
    return tuple(value)


def as_metric(value: Any) -> float:
    """Inverse of :func:`legacy_ddp._text.plain` for a number."""
    if isinstance(value, str) and value in NOT_FINITE:
        return float(value)
    return _as_number(value)


def as_logged(value: Any) -> float | str:
    """Inverse of :func:`legacy_ddp._text.plain`, also for a text; ``"nan"`` is NaN."""
    return value if isinstance(value, str) and value not in NOT_FINITE else as_metric(value)


def _as_number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(number := float(value)):
        raise ValueError
    return number


def mapping_of(convert: Convert[T]) -> Convert[dict[str, T]]:
    def converted(value: Any) -> dict[str, T]:
        if not isinstance(value, dict):
            raise TypeError
        return {as_text(key): convert(item) for key, item in value.items()}

    return converted


_OF_TYPE: dict[type, Convert[Any]] = {str: as_text, int: as_count, float: _as_number, bool: _exactly(bool)}

_int64 = count_below(2**63)  # for the arrays of a page


@dataclass(frozen=True)
class Environment:
    """The first line: the surroundings of this rank, and the steps to record.

    ``facts``: versions, threads, flags and settings as text. ``parameters``: all names, sorted. ``job``: 16 hex digits,
    equal on all ranks of one launcher. ``layout``: 16 hex digits, equal for equal parameters and equal settings of the
    wrapper. ``local_buffers``: names and patterns of buffers that may differ between ranks. ``started``: UTC, ISO 8601.
    """

    rank: int
    world_size: Annotated[int, count_below(MAX_WORLD_SIZE + 1)]
    every: int
    first_step: int
    started: str
    job: str
    layout: str
    facts: Mapping[str, str]
    parameters: tuple[str, ...]
    local_buffers: tuple[str, ...] = ()

    @property
    def has_optimizer(self) -> bool:
        """Whether the recorder was given an optimizer."""
        return self.facts.get("optimizer", NO_OPTIMIZER) != NO_OPTIMIZER

    def to_json(self) -> dict[str, Any]:
        return {"line": "environment", "format": FORMAT, "version": VERSION, **vars(self)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Environment":
        return Environment(**read_fields(Environment, values))


@dataclass(frozen=True)
class Names:
    """The names of the entries of a phase; a file declares them once and refers to them by number.

    ``kinds``: dtype and shape of each tensor; empty for a setting.
    """

    phase: str
    names: tuple[str, ...]
    kinds: tuple[str, ...]

    def to_json(self, number: int) -> dict[str, Any]:
        return {"line": "names", "number": number, **vars(self)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> tuple[int, "Names"]:
        names = read_field(values, "names", distinct_texts)
        kinds = read_field(values, "kinds", sequence_of(as_text), len(names))
        return read_field(values, "number", as_count), Names(read_field(values, "phase", as_phase), names, kinds)


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
    def from_json(values: Mapping[str, Any], size: int) -> "Values":
        nonfinite = sequence_of(pair_of(count_below(size), _int64))
        return Values(
            words=read_field(values, "words", as_digests, size),
            norms=read_field(values, "norms", as_norms, size),
            nonfinite=dict(read_field(values, "nonfinite", nonfinite)),
        )


@dataclass(frozen=True)
class Section:
    """:class:`Values` with their :class:`Names`."""

    names: Names
    values: Values

    @property
    def words(self) -> dict[str, str | None]:
        """Digests of tensors and texts of settings, by name."""
        return dict(zip(self.names.names, self.values.words, strict=True))

    @property
    def norms(self) -> dict[str, float | None]:
        """2-norms, by name."""
        return dict(zip(self.names.names, self.values.norms, strict=True))

    @property
    def kinds(self) -> dict[str, str]:
        """Dtype and shape, by name."""
        return dict(zip(self.names.names, self.names.kinds, strict=True))

    @property
    def nonfinite(self) -> dict[str, int]:
        """Number of NaN or infinite elements, by name, without zeros."""
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
    sample_size: Annotated[int, _int64] | None
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
    metrics: Annotated[Mapping[str, float], mapping_of(as_metric)] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)

    def to_json(self, step: int) -> dict[str, Any]:
        metrics = {name: plain(value) for name, value in self.metrics.items()}
        return {"line": "call", "step": step, **vars(self), "metrics": metrics}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "CallFacts":
        return CallFacts(**read_fields(CallFacts, {"metrics": {}, "parts": {}, **values}))  # as version 1


def log_to_json(step: int, values: Mapping[str, float | str]) -> dict[str, Any]:
    """A line of values that a rank logged after the call of a step."""
    return {"line": "log", "step": step, "values": {name: plain(value) for name, value in values.items()}}


def logged_values(values: Mapping[str, Any]) -> dict[str, float | str]:
    return read_field(values, "values", mapping_of(as_logged))


def end_to_json(step: int, reason: str) -> dict[str, Any]:
    """The last line of a trace after an orderly end: the last step, and ``closed`` or the name of an exception."""
    return {"line": "end", "step": step, "reason": reason}


def end_reason(values: Mapping[str, Any]) -> str:
    return read_field(values, "reason", as_text)


def check_version(values: Mapping[str, Any]) -> None:
    """Refuse a first line of another format or version.

    Raises:
        TraceError: the text has the version of the line.
    """
    if values.get("line") != "environment" or values.get("format") != FORMAT:
        raise TraceError(f"is no trace: got a first line of another kind, expected one of format {FORMAT!r}")
    if values.get("version") not in READABLE_VERSIONS:
        *others, last = map(str, READABLE_VERSIONS)
        readable = f"{', '.join(others)} or {last}"
        raise TraceError(
            f"is of another version: got {values.get('version')!r}, expected {readable}; read it with the legacy_ddp "
            "that wrote it"
        )
