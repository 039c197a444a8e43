"""What ended a call for good? As some rank found it, and as it tells the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Failure:
    """What ended a call for good, as some rank found it. ``is_late``: nothing broke, somebody was silent for too long.

    ``ranks``: who is lost, where that is known without asking.
    """

    reason: str
    is_late: bool = False
    ranks: tuple[int, ...] = ()


def decode_failure(said: Mapping[str, Any] | None) -> Failure | None:
    """A failure that travelled as JSON."""
    return Failure(**{**said, "ranks": tuple(said["ranks"])}) if said else None
