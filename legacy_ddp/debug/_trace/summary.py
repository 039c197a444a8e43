"""Summary of one trace, from one scan of every file: steps, ends, phases, norms, waiting times and environment."""

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from legacy_ddp._statistics import PARTS, LateRank, StepTimes, find_late_rank
from legacy_ddp._text import (
    MAX_LINES,
    MAX_SIDES,
    compare_rows,
    first_few,
    format_bytes,
    name_ranks,
    plain,
    shorten,
    wrap,
)
from legacy_ddp.debug._trace.read import RankTrace, Run, RunCoverage, span, spans
from legacy_ddp.debug._trace.records import PHASE_LABELS, CallFacts

JSON_FORMAT = "legacy_ddp show"
JSON_VERSION = 1
MAX_TEXT = 40  # characters of a logged text

_RANK_FACTS = ("pid",)
_Holders = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class NonFinite:
    """The first tensor with NaN or infinite elements. ``count``: the number of these elements."""

    step: int
    phase: str
    rank: int
    name: str
    count: int


@dataclass(frozen=True)
class Waiting:
    """The rank that the others waited for: it had the shortest wait in ``steps`` of ``of_steps`` steps.

    ``median_seconds``: median over all steps of the longest wait minus the shortest wait.
    """

    rank: int
    steps: int
    of_steps: int
    median_seconds: float


@dataclass(frozen=True)
class Curve:
    """The first and the last recorded value of a metric, or of a logged value.

    ``ranks``: those that recorded the value. ``first``, ``last``: step and value on the lowest of these ranks; NaN and
    infinity as text.
    """

    name: str
    ranks: tuple[int, ...]
    first: tuple[int, float | str]
    last: tuple[int, float | str]


@dataclass(frozen=True)
class Summary:
    """The contents of a trace, in brief.

    ``steps``: first and last step of any rank, None without steps. ``recorded``: number of steps. ``ends``: ranks by
    the end of their files. ``phases``: number of names per phase, at its last step on rank 0. ``facts``: equal on all
    ranks. ``own_facts``: different between ranks, each value with its ranks. ``norms``: step and norm of all reduced
    gradients together, on rank 0, at the first and the last step; without norms too large for a float64. ``metrics``:
    sums over the ranks. ``logged``: values of single ranks. ``operations``: for each step with operations the greatest
    number of a rank. ``missing_operations``: see :class:`RunCoverage`. ``late``: the rank for which the others wait, if
    the wait is a large part of the step.
    """

    folder: str
    world_size: int
    every: int
    started: str
    steps: tuple[int, int] | None
    recorded: int
    size_bytes: int
    ends: dict[str, list[int]]
    phases: dict[str, int]
    facts: dict[str, str]
    own_facts: tuple[tuple[str, _Holders], ...]
    norms: tuple[tuple[int, float], ...]
    nonfinite: NonFinite | None
    waiting: Waiting | None
    metrics: tuple[Curve, ...] = ()
    logged: tuple[Curve, ...] = ()
    operations: tuple[tuple[int, int], ...] = ()
    missing_operations: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    late: LateRank | None = None

    def as_json(self) -> dict[str, Any]:
        return {"format": JSON_FORMAT, "version": JSON_VERSION, **asdict(self)}


def summarise(run: Run) -> Summary:
    """The summary of a run. Scans the files one at a time."""
    found = _Findings()
    for rank in range(run.world_size):
        with run.open(rank) as trace:
            found.add(rank, trace)
    facts, differing = _facts(run)
    environment = run.environments[0]
    return Summary(
        folder=str(run.folder),
        world_size=run.world_size,
        every=environment.every,
        started=environment.started,
        steps=found.coverage.steps,
        recorded=len(found.coverage.recorded),
        size_bytes=run.size_bytes,
        ends=found.ends,
        phases=found.phases,
        facts=facts,
        own_facts=differing,
        norms=found.norms,
        nonfinite=found.nonfinite,
        waiting=found.waits.summary(run.world_size),
        metrics=found.metrics.curves(),
        logged=found.logged.curves(),
        operations=tuple(sorted(found.coverage.operations.items())),
        missing_operations=found.coverage.missing_operations,
        late=found.times.late_rank(run.world_size),
    )


class _Findings:
    def __init__(self) -> None:
        self.coverage = RunCoverage("")
        self.phases: dict[str, int] = {}
        self.norms: tuple[tuple[int, float], ...] = ()
        self.nonfinite: NonFinite | None = None
        self.waits, self.times = _Waits(), _Times()
        self.metrics, self.logged = _Curves(), _Curves()

    def add(self, rank: int, trace: RankTrace) -> None:
        self.coverage.add(rank, trace)
        for step in trace.steps:
            if call := trace.call(step):
                self.waits.add(rank, step, call.seconds_waited)
                self.times.add(rank, step, call)
                if rank == 0:  # the sums are those of all ranks
                    self.metrics.add(rank, step, call.metrics)
        for step, values in trace.logged.items():
            self.logged.add(rank, step, values)
        if trace.nonfinite and (first := self.coverage.nonfinite) and first[2] == rank:
            step, phase = trace.nonfinite
            if (section := trace.section(step, phase)) and section.nonfinite:
                name, count = next(iter(section.nonfinite.items()))
                self.nonfinite = NonFinite(step, phase, rank, name, count)
        if rank == 0:
            self.phases = {phase: _size_of(trace, phase) for phase in trace.phases}
            self.norms = _norms(trace)

    @property
    def ends(self) -> dict[str, list[int]]:
        return {
            f"{end}, no step recorded" if last is None else f"{end} after step {last}": ranks
            for (last, end), ranks in self.coverage.ends.items()
        }


class _Curves:
    """First and last value by name. Ranks are added in ascending order, steps of a rank in ascending order."""

    def __init__(self) -> None:
        self._ranks: dict[str, list[int]] = {}
        self._ends: dict[str, list[tuple[int, float | str]]] = {}

    def add(self, rank: int, step: int, values: Mapping[str, float | str]) -> None:
        for name, value in values.items():
            ranks = self._ranks.setdefault(name, [rank])
            if ranks[-1] != rank:
                ranks.append(rank)
            if rank == ranks[0]:
                self._ends[name] = [*self._ends.get(name, [])[:1], (step, plain(value))]

    def curves(self) -> tuple[Curve, ...]:
        return tuple(Curve(name, tuple(self._ranks[name]), ends[0], ends[-1]) for name, ends in self._ends.items())


class _Waits:
    def __init__(self) -> None:
        # By step: the shortest wait with its rank, the longest wait, and the number of ranks.
        self._of: dict[int, tuple[tuple[float, int], float, int]] = {}

    def add(self, rank: int, step: int, waited: float) -> None:
        least, longest, ranks = self._of.get(step, ((waited, rank), waited, 0))
        self._of[step] = min(least, (waited, rank)), max(longest, waited), ranks + 1

    def summary(self, world_size: int) -> Waiting | None:
        """Over the steps that all ranks recorded; None for a single rank or without such steps."""
        found = [(least, longest) for least, longest, ranks in self._of.values() if ranks == world_size]
        if world_size == 1 or not found:
            return None
        counts = Counter(sorted(rank for (_, rank), _ in found))
        rank, steps = counts.most_common(1)[0]
        return Waiting(rank, steps, len(found), median(longest - least for (least, _), longest in found))


class _Times:
    def __init__(self) -> None:
        # By step: its seconds on rank 0, and of each rank the wait and the parts of the step. One array holds all
        # ranks, to save memory: a trace may have many steps.
        self._of: dict[int, tuple[float, array[float]]] = {}

    def add(self, rank: int, step: int, call: CallFacts) -> None:
        """Ranks come in ascending order. Leaves out calls without parts, from earlier versions of the format."""
        if not call.parts.keys() >= PARTS.keys():
            return
        if rank == 0:
            self._of[step] = sum(call.parts.values()) + sum(call.seconds.values()), array("d")
        if step in self._of:
            self._of[step][1].extend([call.seconds_waited, *(call.parts[part] for part in PARTS)])

    def late_rank(self, world_size: int) -> LateRank | None:
        width = 1 + len(PARTS)
        return find_late_rank(
            [
                StepTimes({part: own[1 + index :: width] for index, part in enumerate(PARTS)}, seconds, own[::width])
                for seconds, own in self._of.values()
                if len(own) == width * world_size
            ]
        )


def _size_of(trace: RankTrace, phase: str) -> int:
    names = next((found for step in reversed(trace.steps) if (found := trace.names(step, phase))), None)
    return len(names.names) if names else 0


def _norms(trace: RankTrace) -> tuple[tuple[int, float], ...]:
    steps = [step for step in trace.steps if trace.names(step, "reduced_gradients")]
    norms = []
    for step in dict.fromkeys(steps[:1] + steps[-1:]):
        if section := trace.section(step, "reduced_gradients"):
            norm = math.hypot(*(norm for norm in section.values.norms if norm is not None))
            norms += [(step, norm)] if math.isfinite(norm) else []  # the joined norm may be too large for a float64
    return tuple(norms)


def _facts(run: Run) -> tuple[dict[str, str], tuple[tuple[str, _Holders], ...]]:
    rows = [
        {fact: value for fact, value in environment.facts.items() if fact not in _RANK_FACTS}
        for environment in run.environments
    ]
    differing = {item.name: item.holders for item in compare_rows(rows).differences}
    return {fact: value for fact, value in rows[0].items() if fact not in differing}, tuple(differing.items())


def lines(found: Summary) -> list[str]:
    text = wrap(f"{found.folder}: {_count(found.world_size, 'rank')}, {_steps_text(found)}, begun {found.started}")
    items = [*_ends_text(found), f"size: {_size_text(found)}", f"phases: {_phases_text(found)}"]
    items += [*_operations_text(found), *_norms_text(found), _nonfinite_text(found), *_waiting_text(found)]
    items += [*_metrics_text(found), *_logged_text(found)]
    text += [line for item in items for line in wrap(item, "  ")]
    text += ["environment of all ranks:" if found.world_size > 1 else "environment:"]
    text += [line for fact, value in found.facts.items() for line in wrap(f"{fact}: {value}", "  ")]
    if found.own_facts:
        text += ["of some:"]
    for fact, holders in found.own_facts:
        values = first_few([f"{value} on {name_ranks(ranks)}" for value, ranks in holders], MAX_SIDES, "{} more")
        text += wrap(f"{fact}: {'; '.join(values)}", "  ")
    return text


def _steps_text(found: Summary) -> str:
    if found.steps is None:
        return "no steps"
    every = f", every {found.every}" if found.every > 1 else ""
    return f"{span(found.steps)} ({found.recorded:,} recorded{every})"


def _ends_text(found: Summary) -> list[str]:
    def group(ranks: list[int]) -> str:
        return "all ranks" if len(ranks) == found.world_size > 1 else name_ranks(ranks)

    ends = [f"end: {group(ranks)}: {end}" for end, ranks in found.ends.items()]
    return first_few(ends, MAX_SIDES, "... {} more ends")


def _size_text(found: Summary) -> str:
    total = format_bytes(found.size_bytes)
    if not found.recorded:
        return total
    return f"{total}, {format_bytes(found.size_bytes / found.recorded / found.world_size)} a step and rank"


def _phases_text(found: Summary) -> str:
    return ", ".join(f"{PHASE_LABELS[phase]} {number:,}" for phase, number in found.phases.items()) or "none"


def _operations_text(found: Summary) -> Iterator[str]:
    if not found.operations:
        return
    counts = [count for _, count in found.operations]
    least, greatest = min(counts), max(counts)
    number = f"{least:,}" if least == greatest else f"{least:,} to {greatest:,}"
    steps = spans([step for step, _ in found.operations])
    yield f"operations of forward and backward: {steps} ({number} a step and rank)"
    missing = [
        f"operations missing on {name_ranks(ranks)}: {spans(lacking)}" for ranks, lacking in found.missing_operations
    ]
    yield from first_few(missing, MAX_SIDES, "... {} more groups of ranks without operations of other ranks")


def _norms_text(found: Summary) -> Iterator[str]:
    if found.norms:
        norms = ", ".join(f"{norm:.6g} at step {step}" for step, norm in found.norms)
        yield f"norm of the reduced gradients: {norms}"


def _nonfinite_text(found: Summary) -> str:
    first = found.nonfinite
    if first is None:
        return "NaN or infinity in tensors: none"
    return (
        f"NaN or infinity in tensors: first at step {first.step} in {PHASE_LABELS[first.phase]} of rank {first.rank}: "
        f"{first.name}, {_count(first.count, 'element')}"
    )


def _waiting_text(found: Summary) -> Iterator[str]:
    if waiting := found.waiting:
        yield (
            f"waiting: others waited for rank {waiting.rank} in {waiting.steps:,} of {waiting.of_steps:,} steps; "
            f"the longest wait of a step beyond the shortest: {1000 * waiting.median_seconds:.3g} ms (median)"
        )
    if found.late:
        yield f"late rank: {found.late}"


def _metrics_text(found: Summary) -> list[str]:
    texts = [f"metric {curve.name!r}, sum over the ranks: {_ends_of_curve(curve)}" for curve in found.metrics]
    return first_few(texts, MAX_LINES, "... {} more metrics")


def _logged_text(found: Summary) -> list[str]:
    texts = []
    for curve in found.logged:
        others = f" (also logged by {name_ranks(curve.ranks[1:])})" if len(curve.ranks) > 1 else ""
        texts.append(f"logged {curve.name!r}, rank {curve.ranks[0]}: {_ends_of_curve(curve)}{others}")
    return first_few(texts, MAX_LINES, "... {} more logged names")


def _ends_of_curve(curve: Curve) -> str:
    ends = dict([curve.first, curve.last])
    return ", ".join(f"{_value(value)} at step {step}" for step, value in ends.items())


def _value(value: float | str) -> str:
    return shorten(value, MAX_TEXT) if isinstance(value, str) else f"{value:.6g}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
