"""Conversion of JSON values to fields of a record, checked by the type of each field. Pure."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._trace.line_format import PHASES

FOREIGN = "has contents that no recorder writes"

NOT_FINITE = ("nan", "inf", "-inf")

T = TypeVar("T")
Convert = Callable[[Any], T]  # raises TypeError, ValueError or OverflowError for a value of the wrong type


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
