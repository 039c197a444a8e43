"""The trace of a run: a folder with one file per rank, the recorded steps, and the ends of the files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from legacy_ddp._errors import TraceError
from legacy_ddp._text import MAX_LINES, first_few, list_some, name_ranks
from legacy_ddp.debug._trace.read import RankTrace, first_line, open_trace
from legacy_ddp.debug._trace.records import PHASE_LABELS, PHASES, RANK_FILE, Environment

_RANK_FILE = re.compile(r"rank-([0-9]{5,})\.jsonl")
_MAX_GROUPS = 3
KILLED = "killed, still running, or recorder stopped"


@dataclass(frozen=True)
class Run:
    """The trace of one run: the environment of every rank, in rank order. Files are opened one at a time.

    Open files of a thousand ranks would exceed the limit of a process.
    """

    folder: Path
    environments: tuple[Environment, ...]

    @property
    def world_size(self) -> int:
        return len(self.environments)

    @cached_property
    def size_bytes(self) -> int:
        """Total size of all files."""
        return sum(path.stat().st_size for path in self.paths)

    def with_local_buffers(self, patterns: Sequence[str]) -> "Run":
        """The same run, with ``patterns`` added to the buffers that may differ between ranks."""
        changed = (replace(item, local_buffers=(*item.local_buffers, *patterns)) for item in self.environments)
        return replace(self, environments=tuple(changed))

    @property
    def paths(self) -> tuple[Path, ...]:
        """The file of every rank."""
        return tuple(self.folder / RANK_FILE.format(rank) for rank in range(self.world_size))

    def open(self, rank: int, until: int | None = None) -> RankTrace:
        """Read the trace file of one rank, up to step ``until`` if given.

        Raises:
            TraceError: the file cannot be read.
        """
        return RankTrace(self.paths[rank], until)


def open_run(folder: Path) -> Run:
    """The run with its trace in ``folder``. Files of other names are ignored.

    Raises:
        TraceError: no folder, no trace in the folder, a missing rank, or files of two runs.
    """
    found = _rank_files(folder)
    environments = {rank: _environment(path) for rank, path in sorted(found.items())}
    sizes = {environment.world_size for environment in environments.values()}
    if len(sizes) > 1:
        raise TraceError(f"{folder} holds files of several runs: got world sizes {sorted(sizes)}, expected one run")
    size = sizes.pop()
    if missing := sorted(set(range(size)) - set(found)):
        raise TraceError(
            f"{folder} lacks {name_ranks(missing)} of {size}; copy the files of all hosts into one folder "
            "(was a rank killed before its recorder began, or is there a recorder on some ranks only?)"
        )
    if unknown := sorted(set(found) - set(range(size))):
        raise TraceError(
            f"{folder} holds files of several runs: got {name_ranks(unknown)}, expected ranks below {size}"
        )
    for field in ("job", "first_step", "every"):
        if len(values := {getattr(environment, field) for environment in environments.values()}) > 1:
            raise TraceError(f"{folder} holds files of several runs: got {field} {sorted(values)}, expected one value")
    return Run(folder, tuple(environments.values()))


def _rank_files(folder: Path) -> dict[int, Path]:
    try:
        entries = sorted(folder.iterdir())
    except NotADirectoryError as error:
        raise TraceError(f"{folder} is a file, expected the folder that a recorder wrote") from error
    except OSError as error:
        raise TraceError(f"{folder} cannot be read: {error.strerror}; expected a recorder's folder") from error
    numbered = {path: int(match[1]) for path in entries if (match := _RANK_FILE.fullmatch(path.name))}
    found = {rank: path for path, rank in numbered.items() if path.name == RANK_FILE.format(rank)}
    if not found:
        names = [path.name for path in entries]
        got = list_some(names) if names else "nothing"
        raise TraceError(f"{folder} holds no trace: got {got}, expected {RANK_FILE.format(0)} and so on")
    return found


def _environment(path: Path) -> Environment:
    with open_trace(path) as file:
        environment, _ = first_line(path, file)
    if path.name != RANK_FILE.format(environment.rank):
        raise TraceError(f"{path} was renamed: it is the trace of rank {environment.rank}")
    return environment


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
    infinity. ``operations``: for each step with operations the greatest number of a rank. ``phases``: of any file,
    each with the ranks of these files. ``ends``: the last step (None without steps) and the end of each file, each with
    the ranks of these files.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.recorded: set[int] = set()
        self.damage: list[tuple[int, str]] = []
        self.reasons: set[str] = set()
        self.nonfinite: tuple[int, int, int] | None = None
        self.operations: dict[int, int] = {}
        self.phases: dict[str, list[int]] = {}
        self.ends: dict[tuple[int | None, str], list[int]] = {}
        self._with_operations: dict[frozenset[int], list[int]] = {}  # ranks by their steps with operations
        self._lasts: dict[int, int | None] = {}

    def add(self, rank: int, trace: RankTrace) -> None:
        """Add the file of one rank."""
        last = self._lasts[rank] = trace.steps[-1] if trace.steps else None
        self.recorded.update(trace.steps)
        self.ends.setdefault((last, end_text(trace)), []).append(rank)
        self.reasons.add(trace.end)
        self._with_operations.setdefault(frozenset(trace.operation_counts), []).append(rank)
        for step, count in trace.operation_counts.items():
            self.operations[step] = max(count, self.operations.get(step, 0))
        if trace.nonfinite:
            step, phase = trace.nonfinite
            found = step, PHASES.index(phase), rank
            self.nonfinite = min(found, self.nonfinite or found)
        for phase in trace.phases:
            self.phases.setdefault(phase, []).append(rank)
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
    def missing_operations(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Groups of ranks, each with the ascending steps in which only other ranks have operations."""
        found = (
            (tuple(ranks), tuple(sorted({*self.operations} - own))) for own, ranks in self._with_operations.items()
        )
        return tuple((ranks, steps) for ranks, steps in found if steps)

    def span(self) -> str:
        """``steps 0-250``, or ``no steps``."""
        return span(self.steps) if self.steps else "no steps"

    def notes(self) -> list[str]:
        """Notes about files without a regular end, ranks with fewer steps or operations, and NaN or infinity."""
        prefix = f"{self.label}: " if self.label else ""
        found = (*self._end_notes(), *self._operation_notes(), *self._nonfinite_notes())
        return [f"{prefix}{note}" for note in found]

    def _end_notes(self) -> list[str]:
        is_even = len({last for last, _ in self.ends}) == 1
        notes = []
        for (last, end), ranks in self.ends.items():
            if end == "closed" and is_even:
                continue
            after = f"after step {last}" if last is not None else "before its first step"
            group = "all ranks" if ranks == [*self._lasts] and len(ranks) > 1 else name_ranks(ranks)
            notes.append(f"{group} ended {after}" + ("" if end == "closed" else f" ({end})"))
        return first_few(notes, _MAX_GROUPS, "{} more ways in which ranks ended")

    def _operation_notes(self) -> list[str]:
        notes = [
            f"operations of {spans(steps)} are missing on {name_ranks(ranks)}"
            for ranks, steps in self.missing_operations
        ]
        return first_few(notes, _MAX_GROUPS, "{} more groups of ranks without operations of other ranks")

    def _nonfinite_notes(self) -> list[str]:
        if self.nonfinite is None:
            return []
        step, phase, rank = self.nonfinite
        return [f"NaN or infinity, first in {PHASE_LABELS[PHASES[phase]]} of step {step} on rank {rank}"]


def spans(steps: Sequence[int]) -> str:
    """Ascending steps as runs of consecutive numbers, ``steps 3-7, step 9``; the first ``MAX_LINES`` of these."""
    starts = [index for index, step in enumerate(steps) if index == 0 or step != steps[index - 1] + 1]
    ends = [start - 1 for start in (*starts[1:], len(steps))]
    found = [span((steps[start], steps[end])) for start, end in zip(starts, ends, strict=True)]
    return ", ".join(first_few(found, MAX_LINES, "... {} more spans of steps"))


def span(steps: tuple[int, int]) -> str:
    """``steps 3-7``, or ``step 3``."""
    first, last = steps
    return f"step {first}" if first == last else f"steps {first}-{last}"
