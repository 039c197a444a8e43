"""How far do the files of a run go, and how did each end? Collected rank by rank, told in groups of ranks. Pure."""

from collections.abc import Mapping

from legacy_ddp._compare import name_ranks
from legacy_ddp.debug._trace.line_format import PHASES, RANK_FILE, SAYS
from legacy_ddp.debug._trace.read import RankTrace

_MAX_GROUPS = 3
KILLED = "killed, or still running"


def how_it_ended(trace: RankTrace) -> str:
    """``closed``, or what came between; where nothing did, killed or still running."""
    if trace.damage:
        return f"damaged at {trace.damage}"
    if trace.torn:
        return f"{KILLED}; its last line is torn"
    if trace.end in ("", "closed"):
        return trace.end or KILLED
    return f"left by {trace.end}"


class Extent:
    """The steps of one run, of the ranks that were looked at. ``label``: A or B, empty for the only run.

    ``recorded``: those of any rank.
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

    def take(self, rank: int, trace: RankTrace) -> None:
        """Look at one file."""
        last = self._lasts[rank] = trace.steps[-1] if trace.steps else None
        self.recorded.update(trace.steps)
        self._ends.setdefault((last, how_it_ended(trace)), []).append(rank)
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
        """The first and the last of any rank, None if there is none."""
        return (min(self.recorded), max(self.recorded)) if self.recorded else None

    def ended_before(self, step: int) -> list[int]:
        """The ranks whose files end before that step."""
        return [rank for rank, last in self._lasts.items() if last is None or last < step]

    @property
    def phases(self) -> Mapping[str, list[int]]:
        """Those that any of the files holds, and the ranks whose."""
        return self._phases

    def span(self) -> str:
        """``steps 0-250``, or ``no steps``."""
        return span(self.steps) if self.steps else "no steps"

    def notes(self) -> list[str]:
        """Files that were not closed, ranks that do not go as far as others, and NaN or infinity."""
        even = len({last for last, _ in self._ends}) == 1
        told, of = [], f"{self.label}: " if self.label else ""
        for (last, how), ranks in self._ends.items():
            if how == "closed" and even:
                continue
            after = f"after step {last}" if last is not None else "before its first step"
            who = "all ranks" if ranks == [*self._lasts] and len(ranks) > 1 else name_ranks(ranks)
            told.append(f"{of}{who} ended {after}" + ("" if how == "closed" else f" ({how})"))
        more = [f"{of}{len(told) - _MAX_GROUPS} more ways in which ranks ended"]
        return told[:_MAX_GROUPS] + (more if len(told) > _MAX_GROUPS else []) + self._say_nonfinite(of)

    def _say_nonfinite(self, of: str) -> list[str]:
        if self.nonfinite is None:
            return []
        step, phase, rank = self.nonfinite
        return [f"{of}NaN or infinity, first in {SAYS[PHASES[phase]]} of step {step} on rank {rank}"]


def span(steps: tuple[int, int]) -> str:
    """``steps 3-7``, or ``step 3``."""
    first, last = steps
    return f"step {first}" if first == last else f"steps {first}-{last}"
