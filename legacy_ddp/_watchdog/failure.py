"""The failure that ended a call for good."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Failure:
    """A failure that ended a call for good.

    ``is_late``: nothing broke, a rank was silent for too long. ``ranks``: the lost ranks, if known without a poll.
    """

    reason: str
    is_late: bool = False
    ranks: tuple[int, ...] = ()


def decode_failure(data: Mapping[str, Any] | None) -> Failure | None:
    """The failure in decoded JSON."""
    return Failure(**{**data, "ranks": tuple(data["ranks"])}) if data else None
