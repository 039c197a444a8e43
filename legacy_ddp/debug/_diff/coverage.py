"""Steps, phases and tensors that were compared on every rank, and ranks that recorded less than others. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from legacy_ddp._compare import name_ranks
from legacy_ddp.debug._trace.coverage import RunCoverage, span
from legacy_ddp.debug._trace.line_format import PHASE_LABELS, PHASES


class Coverage:
    """What was compared on every rank. Ranks come one by one; ``ranks`` counts them."""

    def __init__(self) -> None:
        self.ranks = 0
        self._steps: Counter[int] = Counter()
        self._limits: list[tuple[int, int]] = []
        self._phases: dict[str, list[int]] = {}
        self._amounts: Counter[tuple[int, str]] = Counter()

    def take(self, rank: int, steps: Collection[int], amounts: Mapping[tuple[int, str], int]) -> None:
        """Steps that were compared on one rank, and how many entries in each step and phase."""
        self.ranks += 1
        self._steps.update(steps)
        self._amounts.update(amounts)
        for phase in {phase for _, phase in amounts}:
            self._phases.setdefault(phase, []).append(rank)

    def limit(self, steps: tuple[int, int] | None) -> None:
        """The first and the last step of ranks that are not taken themselves; None if they have none."""
        self._limits.append(steps or (0, -1))

    @property
    def any_steps(self) -> list[int]:
        """Those that were compared on any rank, ascending."""
        return sorted(self._steps)

    @property
    def steps(self) -> list[int]:
        """Those that were compared on every rank, ascending."""
        return sorted(
            step
            for step, ranks in self._steps.items()
            if ranks == self.ranks and all(first <= step <= last for first, last in self._limits)
        )

    @property
    def phases(self) -> tuple[str, ...]:
        """Those that were compared on every rank."""
        return tuple(phase for phase in PHASES if len(self._phases.get(phase, ())) == self.ranks)

    @property
    def tensors(self) -> int:
        """How many were compared in these steps and phases, on all ranks together."""
        steps, phases = set(self.steps), {*self.phases} - {"settings"}
        return sum(number for (step, phase), number in self._amounts.items() if step in steps and phase in phases)

    def notes(self) -> list[str]:
        """Phases that were compared on some ranks alone."""
        lacking: dict[tuple[int, ...], list[str]] = {}
        for phase in PHASES:
            if 0 < len(ranks := self._phases.get(phase, [])) < self.ranks:
                lacking.setdefault(tuple(sorted({*range(self.ranks)} - {*ranks})), []).append(PHASE_LABELS[phase])
        return [
            f"not compared on {name_ranks(ranks)}, where not both runs recorded it: {', '.join(phases)}"
            for ranks, phases in lacking.items()
        ]


def shortfall(extents: Sequence[RunCoverage], steps: Sequence[int]) -> str:
    """Which steps were recorded in every run, but not compared on every rank, and why; empty if all were.

    ``steps``: those that were compared on every rank, and in which nothing differs. The last step of a run need not be
    there on all of its ranks: a job that is killed may leave it on some.
    """
    lacking = set.intersection(*(extent.recorded for extent in extents)) - {*steps}
    if not lacking - {extent.steps[1] for extent in extents if extent.steps}:
        return ""
    first = min(lacking)
    short = [
        f"{name_ranks(ranks)}{f' of {extent.label}' if extent.label else ''}"
        for extent in extents
        if (ranks := extent.ended_before(first))
    ]
    why = f", for {' and '.join(short)} ended before" if short else ""
    were = "were" if len(lacking) > 1 else "was"
    agreed = f"nothing differs in {span_of(steps)}" if steps else "no step was compared on every rank"
    return f"{span((first, max(lacking)))} {were} not compared on every rank{why}; {agreed}"


def span_of(steps: Sequence[int]) -> str:
    """``steps 0-120``; with their number where it is not every one of them."""
    told = span((steps[0], steps[-1]))
    return told if len(steps) == steps[-1] - steps[0] + 1 else f"{told} ({len(steps):,} compared)"
