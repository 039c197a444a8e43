"""Settings from environment variables, for a run without a change of the script.

``LEGACY_DDP_CHECKS`` has a level, fields of :class:`Checks` and ``timeout_seconds``; ``LEGACY_DDP_TRANSPORT`` has a
transport. Both override the arguments of the script.
"""

import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from legacy_ddp._check_settings import (
    CHECKS_VARIABLE,
    LONGEST_SECONDS,
    Checks,
    Level,
    as_checks,
    is_duration,
    refuse_without_effect,
)
from legacy_ddp._settings import TRANSPORT_VARIABLE, TRANSPORTS, Transport

_TIMEOUT = "timeout_seconds"


def resolve_checks(checks: Level | Checks) -> Checks:
    """The checks of the caller, with the level and the fields in ``LEGACY_DDP_CHECKS``."""
    asked = as_checks(checks)
    given = {name: value for name, value in _given().items() if name != _TIMEOUT}
    if not given:
        return asked
    try:
        found = replace(asked, **given)  # the constructor checks the values
        # The settings of the environment alone: its level may make settings of the script ineffective.
        refuse_without_effect(Checks(**{**given, "level": found.level}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"environment variable {CHECKS_VARIABLE}: {error}") from error
    return found


def resolve_timeout(seconds: float | None) -> float | None:
    """``timeout_seconds`` of ``LEGACY_DDP_CHECKS``, else of the caller."""
    chosen = _given().get(_TIMEOUT, seconds)
    if chosen is not seconds and not is_duration(chosen):
        raise ValueError(
            f"environment variable {CHECKS_VARIABLE}: {_TIMEOUT} is not usable: got {chosen!r}, expected a positive "
            f"number of seconds (up to {LONGEST_SECONDS:g})"
        )
    return chosen


def resolve_transport(transport: Transport) -> Transport:
    """The transport in ``LEGACY_DDP_TRANSPORT``, else of the caller."""
    chosen = os.environ.get(TRANSPORT_VARIABLE)
    if chosen and chosen not in TRANSPORTS:
        raise ValueError(f"environment variable {TRANSPORT_VARIABLE}: got {chosen!r}, expected one of {TRANSPORTS}")
    return chosen or transport


def _given() -> dict[str, Any]:
    given: dict[str, Any] = {}
    for item in filter(None, map(str.strip, os.environ.get(CHECKS_VARIABLE, "").split(","))):
        name, is_named, text = map(str.strip, item.partition("="))
        if not is_named:
            name, text = "level", item
        if name not in _READERS:
            raise ValueError(
                f"environment variable {CHECKS_VARIABLE}: got {item!r}, expected a level, or name=value with a name of "
                f"{tuple(_READERS)}"
            )
        if name in given:
            raise ValueError(f"environment variable {CHECKS_VARIABLE}: {name} is set twice; leave one out")
        given[name] = _READERS[name](text)
    return given


def _read_as(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return text  # the constructor refuses it

    return read


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(":")))


# Every field of Checks except the scaler, an object of the script.
_READERS: dict[str, Callable[[str], Any]] = {
    **{item.name: str for item in fields(Checks) if item.name != "grad_scaler"},
    "every": _read_as(int),
    "local_buffers": _read_names,
    "warn_after_seconds": _read_as(float),
    _TIMEOUT: _read_as(float),
}
