"""Reader of results files: rows timed in rounds, and other numbers and texts, by their place.

A place is the path from `results` to the value: titles, names of rows, indices in a list.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMES = ("ms", "us", "seconds", "per_second")
NOTCH = 1.57
Place = tuple[str, ...]
Leaf = float | str


class NotComparable(Exception):  # noqa: N818 - it is no error: the answer is "cannot tell"
    """The text names the unusable file and the reason."""


@dataclass(frozen=True)
class Timed:
    """A row measured in rounds."""

    median_ms: float
    ratio: float
    quartiles: tuple[float, float]
    n: int

    @property
    def interval(self) -> tuple[float, float]:
        """Interval of the median ratio."""
        reach = NOTCH * (self.quartiles[1] - self.quartiles[0]) / math.sqrt(self.n)
        return self.ratio - reach, self.ratio + reach


@dataclass(frozen=True)
class Results:
    """One file: its origin, its timed rows, and all other values by place."""

    environment: Mapping[str, Any]
    rows: Mapping[Place, Timed]
    leaves: Mapping[Place, Leaf]


def read(path: Path) -> Results:
    """The results in a file.

    Raises:
        NotComparable: the file cannot be read, or holds no results.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotComparable(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise NotComparable(f"{path} is no JSON: {error}") from error
    return parse_results(document, str(path))


def parse_results(document: Any, name: str) -> Results:
    """The results in a document of a benchmark.

    Raises:
        NotComparable: the document is not from a benchmark.
    """
    parts = document if isinstance(document, dict) else {}
    for part in ("environment", "results"):
        if not isinstance(parts.get(part), dict):
            raise NotComparable(f"{name} is no results file: it has no object {part!r}; expected what --json writes")
    arguments = parts.get("arguments", {})
    environment = {**parts["environment"], **(arguments if isinstance(arguments, dict) else {})}
    rows: dict[Place, Timed] = {}
    leaves: dict[Place, Leaf] = {}
    for place, value in _walk((), parts["results"]):
        if isinstance(value, dict):
            rows[place] = _timed(value, f"{name}, {told(place)}")
        else:
            leaves[place] = value
    return Results(environment, rows, leaves)


def _walk(place: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    """Timed rows (as dicts) and leaves; of a timed row, no values of :func:`_timed` and no times."""
    inside = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(inside, dict):
        yield place, value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
        return
    # A ratio of two rows, which bench_hosts.py keeps beside them, has an interval and no time: plain numbers.
    is_ratio_alone = "ratio_interval" in inside and "median_ms" not in inside
    if "median_ratio" in inside and not is_ratio_alone:
        yield place, inside
        taken = ("n", "median_ratio", "ratio_quartiles", "ratio_interval")
        inside = {key: item for key, item in inside.items() if key not in taken and not is_kind(str(key), TIMES)}
    for key, item in inside.items():
        yield from _walk((*place, str(key)), item)


def _timed(row: Mapping[str, Any], name: str) -> Timed:
    try:
        low, high = row["ratio_quartiles"]
        numbers = [float(number) for number in (row["median_ms"], row["median_ratio"], low, high)]
        if not all(map(math.isfinite, numbers)) or row["n"] < 1:
            raise ValueError(numbers)
        return Timed(numbers[0], numbers[1], (numbers[2], numbers[3]), row["n"])
    except (KeyError, TypeError, ValueError) as error:
        problem = "expected finite numbers median_ms, median_ratio, two ratio_quartiles, and n from 1 on"
        raise NotComparable(f"{name} is no row of times: {problem}") from error


def is_kind(part: str, kinds: Sequence[str]) -> bool:
    return part in kinds or part.endswith(tuple(f"_{kind}" for kind in kinds))


def told(place: Place) -> str:
    return " / ".join(place)
