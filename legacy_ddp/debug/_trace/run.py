"""The trace of a run: a folder with one file per rank."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from legacy_ddp._compare import name_ranks
from legacy_ddp._errors import TraceError
from legacy_ddp.debug._trace.line_format import RANK_FILE
from legacy_ddp.debug._trace.open_file import first_line, open_trace
from legacy_ddp.debug._trace.read import Progress, RankTrace
from legacy_ddp.debug._trace.records import Environment

_RANK_FILE = re.compile(r"rank-([0-9]{5,})\.jsonl")
_MAX_NAMED = 3


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

    def open(self, rank: int, progress: Progress = lambda _: None, until: int | None = None) -> RankTrace:
        """The scanned file of one rank, or its steps up to ``until``. ``progress`` gets the number of bytes read.

        Raises:
            TraceError: the file cannot be read.
        """
        return RankTrace(self.paths[rank], progress, until)


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
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        got = f"{', '.join(names[:_MAX_NAMED])}{more}" if names else "nothing"
        raise TraceError(f"{folder} holds no trace: got {got}, expected {RANK_FILE.format(0)} and so on")
    return found


def _environment(path: Path) -> Environment:
    with open_trace(path) as file:
        environment, _ = first_line(path, file)
    if path.name != RANK_FILE.format(environment.rank):
        raise TraceError(f"{path} was renamed: it is the trace of rank {environment.rank}")
    return environment
