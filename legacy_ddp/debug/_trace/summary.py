"""What is in a trace? One run, looked through once: steps, environment, phases, norms, who waited for whom."""

import math
from array import array
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from legacy_ddp._compare import compare_rows
from legacy_ddp.debug._trace.coverage import how_it_ended
from legacy_ddp.debug._trace.line_format import PHASES
from legacy_ddp.debug._trace.read import Progress, RankTrace
from legacy_ddp.debug._trace.run import Run

JSON_FORMAT = "legacy_ddp show"
JSON_VERSION = 1

_OF_A_RANK = ("pid",)


@dataclass(frozen=True)
class NonFinite:
    """The first element that is NaN or infinite: in which step, phase and tensor of which rank; and how many."""

    step: int
    phase: str
    rank: int
    name: str
    count: int


@dataclass(frozen=True)
class Waiting:
    """The rank that waited least, so that the others waited for it: in how many of the steps, and how long they did.

    ``median_seconds``: over all steps, what the rank that waited longest waited more than the one that waited least.
    """

    rank: int
    steps: int
    of_steps: int
    median_seconds: float


@dataclass(frozen=True)
class Summary:
    """What a trace holds.

    ``steps``: first and last of any rank, None if there is none; ``recorded``: how many. ``ends``: how files end, and
    the ranks whose do. ``phases``: names in each, at its last step on rank 0. ``facts``: what all ranks share;
    ``own_facts``: what they do not, each value with its ranks. ``norms``: of the reduced gradients as a whole, on rank
    0, with their steps: the first and the last, if a float64 holds them.
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
    own_facts: tuple[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], ...]
    norms: tuple[tuple[int, float], ...]
    nonfinite: NonFinite | None
    waiting: Waiting | None

    def as_json(self) -> dict[str, Any]:
        """For machines; tells its format and version."""
        return {"format": JSON_FORMAT, "version": JSON_VERSION, **asdict(self)}


def summarise(run: Run, progress: Progress = lambda _: None) -> Summary:
    """Look every file through once, one at a time.

    Raises:
        TraceError: the trace cannot be read.
    """
    seen = _Seen()
    for rank in range(run.world_size):
        with run.open(rank, progress) as trace:
            seen.take(rank, trace)
    facts, own = _facts(run)
    environment = run.environments[0]
    return Summary(
        folder=str(run.folder),
        world_size=run.world_size,
        every=environment.every,
        started=environment.started,
        steps=(min(seen.steps), max(seen.steps)) if seen.steps else None,
        recorded=len(seen.steps),
        size_bytes=run.size_bytes,
        ends=seen.ends,
        phases=seen.phases,
        facts=facts,
        own_facts=own,
        norms=seen.norms,
        nonfinite=seen.nonfinite,
        waiting=seen.waits.told(run.world_size),
    )


class _Seen:
    def __init__(self) -> None:
        self.steps: set[int] = set()
        self.ends: dict[str, list[int]] = {}
        self.phases: dict[str, int] = {}
        self.norms: tuple[tuple[int, float], ...] = ()
        self.nonfinite: NonFinite | None = None
        self.waits = _Waits()

    def take(self, rank: int, trace: RankTrace) -> None:
        self.steps.update(trace.steps)
        self.ends.setdefault(_end(trace), []).append(rank)
        self.waits.take(rank, trace)
        self._take_nonfinite(rank, trace)
        if rank == 0:
            self.phases = {phase: _size_of(trace, phase) for phase in trace.phases}
            self.norms = _norms(trace)

    def _take_nonfinite(self, rank: int, trace: RankTrace) -> None:
        if trace.nonfinite is None:
            return
        step, phase = trace.nonfinite
        so_far = self.nonfinite
        if so_far and (so_far.step, PHASES.index(so_far.phase)) <= (step, PHASES.index(phase)):
            return
        if (section := trace.section(step, phase)) and section.nonfinite:
            name, count = next(iter(section.nonfinite.items()))
            self.nonfinite = NonFinite(step, phase, rank, name, count)


class _Waits:
    """Of every step: the rank that waited least, how long it did, and the longest wait."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._least = array("d")
        self._longest = array("d")
        self._who = array("q")
        self._ranks = array("q")

    def take(self, rank: int, trace: RankTrace) -> None:
        for step in trace.steps:
            if call := trace.call(step):
                self._add(step, rank, call.seconds_waited)

    def told(self, world_size: int) -> Waiting | None:
        """Over the steps that all ranks recorded; None for one rank, or no step."""
        rows = [row for row, ranks in enumerate(self._ranks) if ranks == world_size]
        if world_size == 1 or not rows:
            return None
        who = [self._who[row] for row in rows]
        counts = {rank: who.count(rank) for rank in sorted(set(who))}
        rank = max(counts, key=lambda item: counts[item])
        return Waiting(rank, counts[rank], len(rows), median(self._longest[row] - self._least[row] for row in rows))

    def _add(self, step: int, rank: int, seconds: float) -> None:
        row = self._steps.get(step)
        if row is None:
            self._steps[step] = len(self._who)
            for values, value in ((self._least, seconds), (self._longest, seconds)):
                values.append(value)
            self._who.append(rank)
            self._ranks.append(1)
            return
        self._ranks[row] += 1
        self._longest[row] = max(self._longest[row], seconds)
        if seconds < self._least[row]:
            self._least[row], self._who[row] = seconds, rank


def _end(trace: RankTrace) -> str:
    last = f" after step {trace.steps[-1]}" if trace.steps else ", no step recorded"
    return f"{how_it_ended(trace)}{last}"


def _size_of(trace: RankTrace, phase: str) -> int:
    names = next((found for step in reversed(trace.steps) if (found := trace.names(step, phase))), None)
    return len(names.names) if names else 0


def _norms(trace: RankTrace) -> tuple[tuple[int, float], ...]:
    steps = [step for step in trace.steps if trace.names(step, "reduced_gradients")]
    told = []
    for step in dict.fromkeys(steps[:1] + steps[-1:]):
        if section := trace.section(step, "reduced_gradients"):
            norm = math.hypot(*(norm for norm in section.values.norms if norm is not None))
            told += [(step, norm)] if math.isfinite(norm) else []  # that of all may be too large for a float64
    return tuple(told)


def _facts(run: Run) -> tuple[dict[str, str], tuple[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], ...]]:
    rows = [
        {fact: value for fact, value in environment.facts.items() if fact not in _OF_A_RANK}
        for environment in run.environments
    ]
    own = {item.name: item.holders for item in compare_rows(rows).differences}
    return {fact: value for fact, value in rows[0].items() if fact not in own}, tuple(own.items())
