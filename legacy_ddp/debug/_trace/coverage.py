"""The recorded steps of a run and the end of each rank's file, as text for groups of ranks. Pure."""

from collections.abc import Mapping

from legacy_ddp._compare import name_ranks
from legacy_ddp.debug._trace.line_format import PHASE_LABELS, PHASES, RANK_FILE
from legacy_ddp.debug._trace.read import RankTrace

_MAX_GROUPS = 3
KILLED = "killed, still running, or recorder stopped"


def end_text(trace: RankTrace) -> str:
    """``closed``, ``left by`` an exception, damaged, or without an end."""
    if trace.damage:
        return f"damaged at {trace.damage}"
    if trace.torn:
        return f"{KILLED}; its last line is torn"
    if trace.end in ("", "closed"):
        return trace.end or KILLED
    return f"left by {trace.end}"


class RunCoverage:
    """The recorded steps of one run, and the ends of its files, collected rank by rank.

    ``label``: A or B, empty for a single run. ``recorded``: the steps of any rank. ``damage``: rank and damage of each
    damaged file. ``reasons``: the ``end`` of each file. ``nonfinite``: first step, phase index and rank with NaN or
    infinity.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.recorded: set[int] = set()
        self.damage: list[tuple[int, str]] = []
        self.reasons: set[str] = set()
        self.nonfinite: tuple[int, int, int] | None = None
        self._ends: dict[tuple[int | None, str], list[int]] = {}
        self._phases: dict[str, list[int]] = {}
        self._lasts: dict[int, int | None] = {}

    def add(self, rank: int, trace: RankTrace) -> None:
        """Add the file of one rank."""
        last = self._lasts[rank] = trace.steps[-1] if trace.steps else None
        self.recorded.update(trace.steps)
        self._ends.setdefault((last, end_text(trace)), []).append(rank)
        self.reasons.add(trace.end)
        if trace.nonfinite:
            step, phase = trace.nonfinite
            found = step, PHASES.index(phase), rank
            self.nonfinite = min(found, self.nonfinite or found)
        for phase in trace.phases:
            self._phases.setdefault(phase, []).append(rank)
        if trace.damage:
            self.damage.append((rank, f"{RANK_FILE.format(rank)}, {trace.damage}"))

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last step of any rank, None without steps."""
        return (min(self.recorded), max(self.recorded)) if self.recorded else None

    def ended_before(self, step: int) -> list[int]:
        """The ranks with a last step before ``step``."""
        return [rank for rank, last in self._lasts.items() if last is None or last < step]

    @property
    def phases(self) -> Mapping[str, list[int]]:
        """The phases of any file, each with the ranks of these files."""
        return self._phases

    def span(self) -> str:
        """``steps 0-250``, or ``no steps``."""
        return span(self.steps) if self.steps else "no steps"

    def notes(self) -> list[str]:
        """Notes about files without a regular end, ranks with fewer steps than others, and NaN or infinity."""
        prefix = f"{self.label}: " if self.label else ""
        return [f"{prefix}{note}" for note in (*self._end_notes(), *self._nonfinite_notes())]

    def _end_notes(self) -> list[str]:
        is_even = len({last for last, _ in self._ends}) == 1
        notes = []
        for (last, end), ranks in self._ends.items():
            if end == "closed" and is_even:
                continue
            after = f"after step {last}" if last is not None else "before its first step"
            group = "all ranks" if ranks == [*self._lasts] and len(ranks) > 1 else name_ranks(ranks)
            notes.append(f"{group} ended {after}" + ("" if end == "closed" else f" ({end})"))
        more = [f"{len(notes) - _MAX_GROUPS} more ways in which ranks ended"] if len(notes) > _MAX_GROUPS else []
        return notes[:_MAX_GROUPS] + more

    def _nonfinite_notes(self) -> list[str]:
        if self.nonfinite is None:
            return []
        step, phase, rank = self.nonfinite
        return [f"NaN or infinity, first in {PHASE_LABELS[PHASES[phase]]} of step {step} on rank {rank}"]


def span(steps: tuple[int, int]) -> str:
    """``steps 3-7``, or ``step 3``."""
    first, last = steps
    return f"step {first}" if first == last else f"steps {first}-{last}"
