"""Records of a comparison (divergences, locations, causes, the verdict), and their text and JSON. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from legacy_ddp._text import MAX_LINES, MAX_SIDES, name_ranks, table, wrap
from legacy_ddp.debug._operations.operation import at, numbers
from legacy_ddp.debug._trace.records import PHASE_LABELS

Answer = Literal["same", "different", "unknown"]
EXIT_STATUS: dict[Answer, int] = {"same": 0, "different": 1, "unknown": 2}
ROUNDING_LIMIT = 1e-5


@dataclass(frozen=True)
class Side:
    """The value of a differing entry on one side.

    ``label``: ``A`` and ``B`` for two runs, ``ranks 0, 2`` for the ranks of one run. ``value``: digest of a tensor or
    text of a setting, None if absent. ``norm``: of the finite elements. ``nonfinite``: number of NaN and infinite
    elements.
    """

    label: str
    value: str | None
    norm: float | None
    nonfinite: int = 0


@dataclass(frozen=True)
class Divergence:
    """A name with differing values in one step and phase.

    ``step``: the step before ``first_step`` (usually 0) is the start. ``phase``: an item of ``PHASES``. ``name``: for
    example ``gradient of 'fc.weight'``. ``kind``: dtype and shape. ``ranks``: for two runs, the ranks on which A and B
    differ in this name; for one run, the ranks outside the majority, or all ranks without a majority.
    """

    step: int
    phase: str
    name: str
    kind: str
    ranks: tuple[int, ...]
    sides: tuple[Side, ...]

    @property
    def parameter(self) -> str | None:
        """Name of the parameter; None for a buffer or a setting of a parameter group."""
        before, quote, rest = self.name.partition("'")
        return rest.rpartition("'")[0] if quote and before != "buffer " else None


@dataclass(frozen=True)
class Location:
    """A step and phase with differences: the ranks on which names differ, and the number of differing names.

    Consecutive compared steps in which the same names differ on the same ranks are one location. ``steps``: their
    number. ``last_step``: the last of them, None for a single step.
    """

    step: int
    phase: str
    ranks: tuple[int, ...]
    differing: int
    total: int
    last_step: int | None = None
    steps: int = 1


@dataclass(frozen=True)
class Cause:
    """A difference around the training that may explain a divergence.

    ``what``: for example ``threads``. ``sides``: label and value of each side, labelled as in :class:`Side`.
    ``where``: for example ``first at step 7 on rank 1``; empty if the difference is everywhere.
    """

    what: str
    sides: tuple[tuple[str, str], ...]
    where: str = ""


@dataclass(frozen=True)
class MetricDifference:
    """A metric with different sums in two runs.

    ``step``: of the first difference. ``a``, ``b``: the sums there, NaN and infinity as text, None without this metric.
    ``differing``: number of calls with a difference, of ``calls`` compared calls.
    """

    name: str
    step: int
    a: float | str | None
    b: float | str | None
    differing: int
    calls: int


@dataclass(frozen=True)
class OperationRow:
    """A row of the table of operations around the first difference.

    ``numbers``: of the operation in A and in B, from 1; None for a run without it. ``result``: the comparison, in
    words. ``is_first``: the row belongs to the first difference.
    """

    numbers: tuple[int | None, int | None]
    stage: str
    module: str
    name: str
    result: str
    is_first: bool = False


@dataclass(frozen=True)
class OperationFinding:
    """Comparison of the operations of one step of a rank in two runs.

    ``labels``: A and B. ``ranks``: the ranks with this difference; empty without a difference. ``counts``: operations
    of the step in A and in B. ``kind``: ``output`` (inputs agree, an output differs), ``input``, ``sequence``
    (operations that only one run has), ``order`` (the same operations in another order), ``form`` (settings, layout
    and the like) or empty without a difference. ``stage``, ``module``, ``name``: of the first different operation; the
    stage is ``forward``, ``backward`` or ``after backward``. ``summary``: one phrase. ``details``: differing values.
    ``earlier``: operations before that only one run has, and whether they are without influence. ``meaning``,
    ``next_step``: sentences. ``rows``: the operations around the difference.
    """

    step: int
    labels: tuple[str, str]
    ranks: tuple[int, ...]
    counts: tuple[int, int]
    kind: str
    summary: str
    meaning: str
    next_step: str = ""
    stage: str = ""
    module: str = ""
    name: str = ""
    details: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    rows: tuple[OperationRow, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Result of the comparison of two runs, or of the ranks of one run.

    ``folders``: A and B, or the only folder. ``headline``: one sentence. ``steps``: first and last step compared on
    every rank, None without any. ``first``: the first divergence; None unless ``verdict`` is ``different``.
    ``others``: the next few divergences in the same step and phase (for two runs, on the same rank). ``size``: for two
    runs, the greatest relative difference of norms there; None if unknown. ``explanation``: sentences about the first
    divergence. ``causes``: possible causes, likeliest first; among them every setting of the optimizer that differs up
    to there, except ``first`` and ``settings_apart``. ``locations``: the first few, in the order of training.
    ``more_locations``: number of steps and phases with differences beyond ``locations``. ``metrics``: for two runs, the
    first difference of each metric. ``operations``: the first different operation of the first different step; without
    such a step, of the recorded steps; None if no operations were compared. Metrics and operations do not change the
    verdict. ``notes``: parts of the traces that were not compared, with the reason. ``settings_apart``: settings that
    differ and change a step by rounding at most.
    """

    folders: tuple[str, ...]
    verdict: Answer
    headline: str
    steps: tuple[int, int] | None = None
    first: Divergence | None = None
    others: tuple[Divergence, ...] = ()
    size: float | None = None
    explanation: str = ""
    causes: tuple[Cause, ...] = ()
    locations: tuple[Location, ...] = ()
    more_locations: int = 0
    metrics: tuple[MetricDifference, ...] = ()
    operations: OperationFinding | None = None
    notes: tuple[str, ...] = ()
    settings_apart: tuple[Cause, ...] = ()


JSON_FORMAT = "legacy_ddp diff"
JSON_VERSION = 1
# The keys of these fields in the JSON object of version 1.
_JSON_KEYS = {"explanation": "meaning", "locations": "places", "more_locations": "more_places", "value": "word"}


def lines(comparison: Comparison) -> list[str]:
    text = [*wrap(comparison.headline), *_folders(comparison)]
    if comparison.causes:
        text += ["", "these differ around the training, and may explain it:"]
        text += _causes(comparison.causes)
    if comparison.settings_apart:
        text += ["", *wrap("these settings differ, and change a step by rounding at most:")]
        text += _causes(comparison.settings_apart)
    if comparison.first:
        text += ["", *_first(comparison, comparison.first), "", *wrap(f"meaning: {comparison.explanation}")]
    if comparison.operations:
        text += ["", *operation_lines(comparison.operations)]
    if comparison.locations:
        text += ["", *_locations(comparison)]
    if comparison.metrics:
        text += ["", "metrics that differ, each at its first step:", *_metrics(comparison.metrics)]
    if comparison.notes:
        text += ["", *(line for note in comparison.notes for line in wrap(f"note: {note}"))]
    return text


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as an object for JSON, with name and version of its format."""
    members = {"format": JSON_FORMAT, "version": JSON_VERSION, **_members(comparison)}
    return {**members, "first": _divergence(comparison.first), "others": [*map(_divergence, comparison.others)]}


def _divergence(item: Divergence | None) -> dict[str, Any] | None:
    return None if item is None else {**_members(item), "parameter": item.parameter}


def _members(record: Comparison | Divergence) -> dict[str, Any]:
    return asdict(record, dict_factory=lambda fields: {_JSON_KEYS.get(name, name): value for name, value in fields})


def _causes(causes: Sequence[Cause]) -> Iterator[str]:
    for cause in causes:  # no cap: the line left out might be the reason
        yield from wrap(": ".join(cause_parts(cause)), "  ")


def cause_parts(cause: Cause) -> tuple[str, str]:
    """What differs and where; and the values of the sides."""
    sides = ", ".join(f"{value} in {label}" for label, value in cause.sides)
    return f"{cause.what}{f', {cause.where}' if cause.where else ''}", sides


def _first(comparison: Comparison, first: Divergence) -> Iterator[str]:
    kind = f", {first.kind}" if first.kind else ""
    yield from wrap(f"step {first.step}, {PHASE_LABELS[first.phase]}, {name_ranks(first.ranks)}: {first.name}{kind}")
    for side in first.sides[:MAX_SIDES]:
        yield from wrap(f"{side.label}: {_value(side)}", "  ")
    yield from _more(len(first.sides) - MAX_SIDES, " groups")
    if difference := _norm_difference(first, comparison.size):
        yield from wrap(difference, "  ")
    total = next((location.differing for location in comparison.locations), 1)
    if total > 1:
        names = ", ".join(item.name for item in comparison.others[:2])
        yield from wrap(f"{total - 1} more there, {'such as ' if total > 3 else ''}{names}", "  ")


def _value(side: Side) -> str:
    parts = [side.value if side.value is not None else "nothing"]
    if side.norm is not None:
        parts.append(f"norm {side.norm:.9g}")
    if side.nonfinite:
        parts.append(f"{side.nonfinite} not finite")
    return ", ".join(parts)


def relative_difference(a: float, b: float) -> float:
    """Difference of two norms, divided by the greater norm."""
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def _norm_difference(first: Divergence, size: float | None) -> str:
    if len(first.sides) != 2 or any(side.norm is None or side.nonfinite for side in first.sides):
        return ""
    a, b = (side.norm or 0.0 for side in first.sides)
    if a == b:
        return "their norms are equal: values in another order, other signs, or a difference below a norm's bits"
    share = relative_difference(a, b)
    text = f"relative difference of norms {share:.2g}"
    if share <= ROUNDING_LIMIT:
        return f"{text}, of rounding size"
    small = size is not None and size <= ROUNDING_LIMIT
    return text + (", of rounding size beside the norm of all of them" if small else "")


def _locations(comparison: Comparison) -> list[str]:
    total = sum(location.steps for location in comparison.locations) + comparison.more_locations
    rows = [("step", "phase", "differ", "")]
    for item in comparison.locations[:MAX_LINES]:
        steps = str(item.step) if item.last_step is None else f"{item.step}-{item.last_step}"
        rows.append((steps, PHASE_LABELS[item.phase], f"{item.differing} of {item.total}", name_ranks(item.ranks)))
    return [
        f"{total:,} place{'s' * (total != 1)} that differ{'s' * (total == 1)}, in the order of training:",
        *table(rows),
        *_more(comparison.more_locations + sum(item.steps for item in comparison.locations[MAX_LINES:])),
    ]


def _metrics(differences: Sequence[MetricDifference]) -> Iterator[str]:
    for item in differences[:MAX_LINES]:
        sums = zip("AB", ("nothing" if value is None else value for value in (item.a, item.b)), strict=True)
        sides = ", ".join(f"{value} in {label}" for label, value in sums)
        share = f"differs in {item.differing:,} of {item.calls:,} calls"
        yield from wrap(f"{item.name!r}, step {item.step}: {sides} ({share})", "  ")
    yield from _more(len(differences) - MAX_LINES)


def _more(number: int, unit: str = "") -> list[str]:
    return [f"  ... {number:,} more{unit}"] if number > 0 else []


def _folders(comparison: Comparison) -> Iterator[str]:
    labels = ("A", "B") if len(comparison.folders) == 2 else ("trace",)
    for label, folder in zip(labels, comparison.folders, strict=True):
        yield from wrap(f"{label}: {folder}", "  ")


def operation_lines(found: OperationFinding) -> Iterator[str]:
    """The section about operations, with the first difference first."""
    yield from wrap(f"operations of step {found.step}{on_ranks(found)}: {_counts(found)}")
    yield from wrap(f"{found.summary}{_number(found)}", "  ")
    for item in found.details:
        yield from wrap(item, "    ")
    for item in found.earlier[:MAX_SIDES]:
        yield from wrap(item, "  ")
    yield from wrap(f"meaning: {found.meaning}", "  ")
    if found.next_step:
        yield from wrap(f"next: {found.next_step}", "  ")


def on_ranks(found: OperationFinding) -> str:
    """`` on ranks 0-1``, for a headline; empty without a difference."""
    return f" on {name_ranks(found.ranks)}" if found.ranks else ""


def _counts(found: OperationFinding) -> str:
    """``371 in A, 370 in B``, or ``371``."""
    a, b = found.counts
    numbers = f"{a:,}" if a == b else f"{a:,} {at(found.labels[0])}, {b:,} {at(found.labels[1])}"
    return f"{numbers}, the first that differs:" if found.kind else numbers


def _number(found: OperationFinding) -> str:
    first = next((row.numbers for row in found.rows if row.is_first), None)
    return f" ({numbers(first, found.labels)})" if first else ""
