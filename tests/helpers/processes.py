"""Threads, children and open files of processes, from /proc: any of them may end between listing and reading."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def _unless_ended() -> Iterator[None]:
    """End the block if what it reads has ended: no such file, or no such process (ESRCH) behind an open file."""
    with suppress(FileNotFoundError, ProcessLookupError):
        yield


def children() -> list[int]:
    """Children of the threads of this process."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with _unless_ended():
            found += map(int, Path(f"/proc/self/task/{task}/children").read_text().split())
    return found


def open_files() -> list[str]:
    """Targets of the open descriptors of this process, among them the list itself."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with _unless_ended():
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def state(pid: int) -> str:
    """The letter of proc(5), for example T for stopped; Z also for a process that is gone."""
    fields: list[str] = []
    with _unless_ended():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0] if fields else "Z"


def with_variable(mark: str) -> dict[int, bytes]:
    """Command lines of the processes that were started with ``mark`` in their environment, or whose parent was."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with _unless_ended(), suppress(PermissionError):  # of another user
            if mark.encode() in (path / "environ").read_bytes():
                found[int(path.name)] = (path / "cmdline").read_bytes()
    return found
