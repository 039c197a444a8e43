"""``legacy-ddp watch``: the jobs of the user on this host, and a table of what the ranks of a job do.

The command asks one rank of each job, through the Unix socket of its process. The rank polls all ranks, and answers
with rows: the command needs neither torch nor the secrets of the job.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from legacy_ddp._text import TIE, WIDTH, first_few, name_ranks, printable, shorten, wrap
from legacy_ddp._watchdog.local import ask, folder_of, folders, problem_of, sockets

EXIT_MOVING, EXIT_LATE = 0, 1
_FORMAT = "legacy_ddp watch"
# Processes that do not answer in the first time are asked again, unless another rank has named them.
_QUICK_SECONDS, _PROCESS_SECONDS = 0.3, 2.0
_JOB_SECONDS = 30.0  # the rank polls all ranks twice: silent ranks on crowded machines take seconds
_MAX_CONCURRENT = 32
_WHY_SILENT = "it begins, is stopped, runs another version of the library, or C code holds up Python"
_MAX_RANK_COLUMNS, _MAX_HOST_COLUMNS = 12, 16
_MAX_STACKS = 8
_UNDER_JOB = " " * 10  # under the number of its process


class WatchError(Exception):
    """There is no job to show. The text says what to do next."""


@dataclass(frozen=True)
class Job:
    """A job with ranks on this host. ``first``: its first known rank; ``sockets``: those that answered, by process."""

    size: int
    first: tuple[Any, ...]
    pids: tuple[int, ...]
    sockets: tuple[tuple[int, Path], ...]


def find_jobs() -> tuple[list[Job], list[str]]:
    """The jobs of this user on this host, and notes on processes that do not answer. Removes the files of dead jobs.

    Raises:
        WatchError: a folder of sockets cannot be trusted.
    """
    found: list[tuple[int, Path]] = []
    notes = []
    for folder, user in folders():
        if problem := problem_of(folder, user):
            if user == os.geteuid():
                raise WatchError(problem)
            notes.append(problem)  # any user can make a folder for root to find
            continue
        with suppress(PermissionError, NotADirectoryError):
            found += sockets(folder)
    answers: dict[Path, dict[str, Any]] = {}
    silent = found
    for seconds in (_QUICK_SECONDS, _PROCESS_SECONDS):
        answers |= _ask_processes([path for _, path in silent], seconds)
        known = {pid for answer in answers.values() for pid in answer.get("pids", ())}
        silent = [(pid, path) for pid, path in found if answers.get(path) == {} and pid not in known]
    notes += [f"process {pid} does not answer: {_WHY_SILENT}" for pid, _ in silent]
    return _jobs([(pid, path, answer) for pid, path in found if (answer := answers.get(path))]), notes


def _ask_processes(paths: Sequence[Path], seconds: float) -> dict[Path, dict[str, Any]]:
    """The answer of each process that has not ended; empty of one that does not answer."""
    with ThreadPoolExecutor(_MAX_CONCURRENT) as pool:
        answers = pool.map(partial(_ask_process, seconds=seconds), paths)
        return {path: answer for path, answer in zip(paths, answers, strict=True) if answer is not None}


def _ask_process(path: Path, seconds: float) -> dict[str, Any] | None:
    try:
        return ask(path, {"request": "process"}, seconds)
    except (ConnectionRefusedError, FileNotFoundError):
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()  # if it was the last
        return None
    except OSError:
        return {}


def _jobs(found: Sequence[tuple[int, Path, dict[str, Any]]]) -> list[Job]:
    groups: dict[tuple[int, tuple[Any, ...]], list[tuple[int, Path, dict[str, Any]]]] = {}
    for one in found:
        groups.setdefault((one[2]["size"], tuple(one[2]["first"])), []).append(one)
    return [
        Job(
            size,
            first,
            tuple(sorted({pid for _, _, answer in group for pid in answer["pids"]} | {pid for pid, _, _ in group})),
            tuple((pid, path) for pid, path, _ in group),
        )
        for (size, first), group in sorted(groups.items(), key=lambda item: item[1][0][0])
    ]


def look(pid: int | None, *, with_stacks: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """What each job says, or the job of process ``pid`` alone; and notes.

    Raises:
        WatchError: there is no such job.
    """
    jobs, notes = find_jobs()
    chosen = [job for job in jobs if pid is None or pid in job.pids]
    if not chosen:
        raise WatchError(_no_job(jobs, pid, notes))
    with ThreadPoolExecutor(_MAX_CONCURRENT) as pool:
        answers = list(pool.map(partial(_ask_job, with_stacks=with_stacks), chosen))
    silent = [job.pids[0] for job, answer in zip(chosen, answers, strict=True) if answer is None]
    notes += [f"no rank of the job of process {pid} answers" for pid in silent]
    if not any(answers):
        raise WatchError("; ".join(notes) + "; try again, or look at its processes with py-spy")
    return [answer for answer in answers if answer], notes


def _ask_job(job: Job, *, with_stacks: bool) -> dict[str, Any] | None:
    deadline = time.monotonic() + _JOB_SECONDS
    for pid, path in job.sockets:
        with suppress(OSError):
            answer = ask(path, {"request": "job", "stacks": with_stacks}, max(1.0, deadline - time.monotonic()))
            return {"pid": pid, **answer}
    return None


def _no_job(jobs: Sequence[Job], pid: int | None, notes: Sequence[str]) -> str:
    if jobs and pid is not None:
        known = first_few([job.pids[0] for job in jobs], 8)
        return f"process {pid} is no rank of a job here: expected a rank, such as {', '.join(known)}"
    if notes:
        return f"no job answers: {'; '.join(first_few(notes, 3))}; try again"
    return (
        f"no job: got no process in {folder_of(os.geteuid())}, expected a rank of this user that has made a call; "
        'a job with checks="off" is not seen; run this in the container of the job, and with its TMPDIR'
    )


def exit_status(answers: Sequence[dict[str, Any]]) -> int:
    return EXIT_LATE if any(answer["state"] == "late" for answer in answers) else EXIT_MOVING


def as_json(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"format": _FORMAT, "jobs": list(answers)}


def lines(answers: Sequence[dict[str, Any]]) -> list[str]:
    """The table of a job, or a table of several jobs; with stacks the table of each."""
    if len(answers) > 1 and not any(answer["stacks"] for answer in answers):
        return _jobs_lines(answers)
    return [line for number, answer in enumerate(answers) for line in [*[""] * bool(number), *_job_lines(answer)]]


def _jobs_lines(answers: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each job, and who waits for whom in it."""
    found = [f"{'pid':>8} {'ranks':>6} {'hosts':>6}  {'call':<34}{'state'}"]
    for one in answers:
        call = shorten(one["call"] or "none yet", 32)
        found.append(f"{one['pid']:>8} {one['size']:>6} {len(one['hosts']):>6}  {call:<34}{_state(one)}")
        found += wrap(one["summary"], indent=_UNDER_JOB, deeper="", break_words=False)
    return [*found, "", "legacy-ddp watch PID shows one of them"]


def _state(answer: dict[str, Any]) -> str:
    seconds = answer["seconds"]
    return answer["state"] if seconds is None else f"waits for {_duration(seconds)}"


def _job_lines(answer: dict[str, Any]) -> list[str]:
    size = f"{answer['size']} rank{'s' if answer['size'] != 1 else ''}"
    where = f"{', '.join(first_few(answer['hosts'], 3))}, process{TIE}{answer['pid']}"
    head = f"{size} on {where}: {_state(answer)}"
    told = answer["summary"] or (f"at {answer['call']}" if answer["call"] else "no call yet")
    return [
        *wrap(head, ties=True),
        *wrap(told, indent="  ", break_words=False),
        "",
        *_table(answer["rows"], with_hosts=len(answer["hosts"]) > 1),
        *_stacks(answer["stacks"] or []),
    ]


def _table(rows: Sequence[dict[str, Any]], *, with_hosts: bool) -> list[str]:
    """A line for all ranks of equal activity and state; more lines if the activity is long."""
    with_steps = any(seconds is not None for row in rows for seconds in row["step_seconds"])
    names = [_ranks(row["ranks"]) for row in rows]
    width = max(map(len, ("rank", *names)))
    head = ["state", "for", *(["step"] if with_steps else []), *(["host"] if with_hosts else [])]
    ends = [
        [
            row["state"],
            _range(row["seconds"]),
            *([_range(row["step_seconds"])] if with_steps else []),
            *([_hosts(row["hosts"])] if with_hosts else []),
        ]
        for row in rows
    ]
    widths = [max(len(cells[place]) for cells in (head, *ends)) for place in range(len(head))]
    free = WIDTH - width - 2 - sum(size + 2 for size in widths)
    doings = [wrap(row["doing"], deeper="", columns=free) or [""] for row in rows]
    columns = max(len(line) for doing in (["doing"], *doings) for line in doing)
    found = []
    for name, doing, end in zip(("rank", *names), (["doing"], *doings), (head, *ends), strict=True):
        state, *numbers = end
        host = f"  {numbers.pop()}" if with_hosts else ""
        cells = "".join(f"  {cell:>{size}}" for cell, size in zip(numbers, widths[1:], strict=False))
        found.append(f"{name:>{width}}  {doing[0]:<{columns}}  {state:<{widths[0]}}{cells}{host}".rstrip())
        found += [f"{'':{width}}  {line}" for line in doing[1:]]
    return found


def _ranks(ranks: Sequence[int]) -> str:
    """``0-2, 5``, or the beginning of it and the number of all: ``0, 2, .. (32)``."""
    text = name_ranks(ranks).partition(" ")[2]
    if len(text) <= _MAX_RANK_COLUMNS:
        return text
    number = f" .. ({len(ranks)})"
    return text[: _MAX_RANK_COLUMNS - len(number)].rpartition(",")[0] + number


def _hosts(hosts: Sequence[str]) -> str:
    names = list(dict.fromkeys(hosts))
    return shorten(names[0], _MAX_HOST_COLUMNS) if len(names) == 1 else f"{len(names)} hosts"


def _range(seconds: Sequence[float | None]) -> str:
    """The shortest and the longest time; empty if none is known."""
    known = sorted(one for one in seconds if one is not None)
    if not known:
        return ""
    first, last = _duration(known[0]), _duration(known[-1])
    if first == last:
        return last
    unit = f" {last.rpartition(' ')[2]}"
    return f"{first.removesuffix(unit)}-{last}"


def _duration(seconds: float) -> str:
    for limit, unit, size in ((1, "ms", 0.001), (120, "s", 1), (7200, "min", 60)):
        if seconds < limit:
            number = seconds / size
            return f"{number:.{1 if number < 10 else 0}f} {unit}"
    return f"{seconds / 3600:.1f} h"


def _stacks(stacks: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    for one in stacks[:_MAX_STACKS]:
        found += ["", *wrap(f"stack of {name_ranks(one['ranks'])}, innermost last:")]
        found += [shorten(f"  {printable(frame)}", WIDTH) for frame in one["stack"]]
    if len(stacks) > _MAX_STACKS:
        left = [rank for one in stacks[_MAX_STACKS:] for rank in one["ranks"]]
        found += ["", *wrap(f"... other stacks of {name_ranks(left)}")]
    return found
