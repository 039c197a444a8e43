"""The failure that ended a call for good, and its decoding from JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Failure:
    """A failure that ended a call for good, as one rank found it.

    ``is_late``: nothing broke, a rank was silent for too long. ``ranks``: lost ranks, if known without a poll.
    """

    reason: str
    is_late: bool = False
    ranks: tuple[int, ...] = ()


def decode_failure(data: Mapping[str, Any] | None) -> Failure | None:
    """The failure in decoded JSON, or None."""
    return Failure(**{**data, "ranks": tuple(data["ranks"])}) if data else None
