"""How is a comparison told? First divergence first, as text of 80 columns and as an object for JSON. Pure."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from legacy_ddp._compare import MAX_LINES, MAX_SIDES, name_ranks
from legacy_ddp._text import table, wrap
from legacy_ddp.debug._diff.growth import ROUNDING
from legacy_ddp.debug._diff.result import Cause, Comparison, Divergence, Side
from legacy_ddp.debug._diff.sections import relative
from legacy_ddp.debug._trace.line_format import PHASE_LABELS

JSON_FORMAT = "legacy_ddp diff"
JSON_VERSION = 1


def lines(found: Comparison) -> list[str]:
    """The text, a line each."""
    told = [*wrap(found.headline), *_folders(found)]
    if found.causes:
        told += ["", "these differ around the training, and may explain it:"]
        told += [line for cause in found.causes[:MAX_LINES] for line in wrap(_cause(cause), "  ")]
        told += _more(len(found.causes) - MAX_LINES)
    if found.first:
        told += ["", *_first(found, found.first), "", *wrap(f"meaning: {found.meaning}")]
    if found.places:
        told += ["", *_places(found)]
    if found.notes:
        told += ["", *(line for note in found.notes for line in wrap(f"note: {note}"))]
    return told


def as_json(found: Comparison) -> dict[str, Any]:
    """The same for machines; tells its format and version."""
    told = {"format": JSON_FORMAT, "version": JSON_VERSION, **asdict(found)}
    return {**told, "first": _object(found.first), "others": [_object(item) for item in found.others]}


def _object(item: Divergence | None) -> dict[str, Any] | None:
    return None if item is None else {**asdict(item), "parameter": item.parameter}


def _cause(cause: Cause) -> str:
    sides = ", ".join(f"{value} in {label}" for label, value in cause.sides)
    return f"{cause.what}{f', {cause.where}' if cause.where else ''}: {sides}"


def _first(found: Comparison, first: Divergence) -> Iterator[str]:
    kind = f", {first.kind}" if first.kind else ""
    yield from wrap(f"step {first.step}, {PHASE_LABELS[first.phase]}, {name_ranks(first.ranks)}: {first.name}{kind}")
    for side in first.sides[:MAX_SIDES]:
        yield from wrap(f"{side.label}: {_held(side)}", "  ")
    yield from _more(len(first.sides) - MAX_SIDES, " groups")
    if share := _share(first, found.size):
        yield from wrap(share, "  ")
    total = next((place.differing for place in found.places), 1)
    if total > 1:
        names = ", ".join(item.name for item in found.others[:2])
        yield from wrap(f"{total - 1} more there, {'such as ' if total > 3 else ''}{names}", "  ")


def _held(side: Side) -> str:
    words = [side.word if side.word is not None else "nothing"]
    if side.norm is not None:
        words.append(f"norm {side.norm:.9g}")
    if side.nonfinite:
        words.append(f"{side.nonfinite} not finite")
    return ", ".join(words)


def _share(first: Divergence, size: float | None) -> str:
    if len(first.sides) != 2 or any(side.norm is None or side.nonfinite for side in first.sides):
        return ""
    a, b = (side.norm or 0.0 for side in first.sides)
    if a == b:
        return "their norms are equal: values in another order, other signs, or a difference below a norm's bits"
    share = relative(a, b)
    told = f"relative difference of norms {share:.2g}"
    if share <= ROUNDING:
        return f"{told}, of rounding size"
    return told + (", of rounding size beside the norm of all of them" if size is not None and size <= ROUNDING else "")


def _places(found: Comparison) -> list[str]:
    total = sum(place.steps for place in found.places) + found.more_places
    rows = [("step", "phase", "differ", "")]
    for place in found.places[:MAX_LINES]:
        steps = str(place.step) if place.last_step is None else f"{place.step}-{place.last_step}"
        rows.append((steps, PHASE_LABELS[place.phase], f"{place.differing} of {place.total}", name_ranks(place.ranks)))
    return [
        f"{total:,} place{'s' * (total != 1)} that differ{'s' * (total == 1)}, in the order of training:",
        *table(rows),
        *_more(found.more_places + sum(place.steps for place in found.places[MAX_LINES:])),
    ]


def _more(number: int, what: str = "") -> list[str]:
    return [f"  ... {number:,} more{what}"] if number > 0 else []


def _folders(found: Comparison) -> Iterator[str]:
    labels = ("A", "B") if len(found.folders) == 2 else ("trace",)
    for label, folder in zip(labels, found.folders, strict=True):
        yield from wrap(f"{label}: {folder}", "  ")
