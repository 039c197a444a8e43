"""Is a member of a line what it should be? Said by name, if not. Pure."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._trace.line_format import PHASES

T = TypeVar("T")
S = TypeVar("S")


class Members:
    """Looks members up, and says which one is not what it should be."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        self._members = members

    def __call__(self, name: str, convert: Callable[[Any], T], size: int | None = None) -> T:
        try:
            value = convert(self._members[name])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise TraceError(f"says what no recorder writes: member {name!r} is missing or of another kind") from error
        if size is not None and isinstance(value, tuple) and len(value) != size:
            raise TraceError(
                f"says what no recorder writes: member {name!r} has {len(value)} entries, expected {size}, one for each"
            )
        return value

    def count(self, name: str) -> int:
        return self(name, as_whole)


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def distinct_texts(value: Any) -> tuple[str, ...]:
    names = sequence_of(as_text)(value)
    if len({*names}) < len(names):
        raise ValueError
    return names


def as_whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError
    return value


def below(size: int) -> Callable[[Any], int]:
    def converted(value: Any) -> int:
        if (position := as_whole(value)) >= size:
            raise ValueError
        return position

    return converted


def as_number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError
    if not math.isfinite(number := float(value)):
        raise ValueError
    return number


def as_truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def as_phase(value: Any) -> str:
    if value not in PHASES:
        raise ValueError
    return str(value)


def optional(convert: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if value is None else convert(value)


def sequence_of(convert: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    def converted(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise TypeError
        return tuple(map(convert, value))

    return converted


def entries_of(*kinds: type) -> Callable[[Any], tuple[Any, ...]]:
    """A long sequence of those or None: looked at as a whole, for a trace holds millions of them."""

    def converted(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not {*map(type, value)} <= {*kinds, type(None)}:
            raise TypeError
        return tuple(value)

    return converted


def as_norms(value: Any) -> tuple[float | None, ...]:
    entries = entries_of(float, int)(value)
    # Python reads 1e999, NaN and Infinity as floats; neither a page nor JSON has a place for them.
    if not all(map(math.isfinite, filter(None, entries))):
        raise ValueError
    return (
        tuple([entry if entry is None else float(entry) for entry in entries]) if int in map(type, entries) else entries
    )


def mapping_of(convert: Callable[[Any], T]) -> Callable[[Any], dict[str, T]]:
    def converted(value: Any) -> dict[str, T]:
        if not isinstance(value, dict):
            raise TypeError
        return {as_text(key): convert(item) for key, item in value.items()}

    return converted


def pair_of(first: Callable[[Any], T], second: Callable[[Any], S]) -> Callable[[Any], tuple[T, S]]:
    def converted(value: Any) -> tuple[T, S]:
        if not isinstance(value, list):
            raise TypeError
        one, other = value
        return first(one), second(other)

    return converted
