"""What the ranks of a job do, and who waits for whom, for ``legacy-ddp watch``. Pure.

Everything is told from two polls that agree. In one poll of a job that moves, the ranks answer one after the other, and
a rank that was asked early looks as if it were behind.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from legacy_ddp._explain.missing import (
    MIN_WAIT_SECONDS,
    WAITING_PHASES,
    activity_text,
    compose,
    compose_payload,
    equal_stacks,
)
from legacy_ddp._explain.stall import OUTSIDE, compose_stall
from legacy_ddp._text import printable
from legacy_ddp._watchdog.process import STOPPED, TRACED
from legacy_ddp._watchdog.reports import Report
from legacy_ddp._watchdog.status import Row

_MAX_STACKS = 64
_MOVED = "its loop goes on"  # what a rank does whose call or phase differs between two polls
# The state of the job. As far as is known, nobody waits for another rank, and ranks move, or no rank does; somebody
# waits; somebody waits for longer than is usual.
MOVING, IDLE, WAITING, LATE = "moving", "idle", "waiting", "late"


def describe_job(
    rows: Sequence[Row], global_ranks: Sequence[int], job_size: int, warn_after_seconds: float, *, with_stacks: bool
) -> dict[str, Any]:
    """The job, ready for JSON. ``rows``: of all ranks of the group, polled twice. The rest: as for compose_stall()."""
    waits = {row.rank: seconds for row in rows if (seconds := _waited_seconds(row)) is not None}
    seconds = max(waits.values(), default=None)
    is_late = seconds is not None and seconds > warn_after_seconds
    # A rank that went on during the polls may be the one that a short wait was for.
    is_sure = is_late or not any(row.has_moved for row in rows)
    report = _report(rows, global_ranks, job_size) if waits and is_sure else None
    # Ranks that are all in a call exchange gradients, as far as a short wait tells.
    is_told = is_late or (report is not None and bool(report.missing or report.phase == OUTSIDE))
    missing = report.missing if report is not None and is_told else ()
    return {
        "size": len(rows),
        "hosts": list(dict.fromkeys(printable(row.host) for row in rows if row.pid)),
        "pids": [row.pid for row in rows],
        "call": printable(max(rows, key=lambda row: (bool(row.last_call), row.progress)).last_call),
        "state": LATE if is_late else WAITING if is_told else MOVING if waits or any(map(_moves, rows)) else IDLE,
        "seconds": round(seconds, 3) if is_told and seconds is not None else None,
        "warn_after_seconds": warn_after_seconds,
        "missing": list(missing),
        "summary": report.head if report is not None and is_told else "",
        "rows": _groups(rows, missing, waits),
        "stacks": _stacks(rows) if with_stacks else None,
    }


def _moves(row: Row) -> bool:
    return row.has_moved or row.is_advancing or bool(row.is_busy)


def _waited_seconds(row: Row) -> float | None:
    """How long the rank has waited for other ranks, as two polls agree; None if it does not wait."""
    if row.sample is None or row.is_busy is None or row.has_moved:
        return None
    if row.in_call:
        return row.sample.age_seconds if row.sample.phase in WAITING_PHASES else None
    if row.payloads.is_late:
        return row.payloads.seconds
    return row.wait.seconds if row.wait is not None and row.wait.seconds >= MIN_WAIT_SECONDS else None


def _report(rows: Sequence[Row], global_ranks: Sequence[int], job_size: int) -> Report | None:
    if any(row.in_call for row in rows):
        return compose(rows)
    late = [row.payloads for row in rows if row.payloads.is_late]
    if late:
        oldest = min(late, key=lambda payloads: payloads.serial)
        return compose_payload(rows, oldest.call, oldest.serial)
    return compose_stall(rows, global_ranks, job_size)


def _groups(rows: Sequence[Row], missing: Sequence[int], waits: Collection[int]) -> list[Mapping[str, Any]]:
    """The rows by equal activity and state, those of missing ranks first. Lists are in the order of ``ranks``."""
    behind = {*missing}
    groups: dict[tuple[bool, str, str], list[Row]] = {}
    for row in rows:
        doing = _MOVED if row.has_moved else printable(activity_text(row))
        state = "waits" if row.rank in waits and row.rank not in behind else _state(row)
        groups.setdefault((row.rank not in behind, doing, state), []).append(row)
    return [
        {
            "ranks": [row.rank for row in group],
            "doing": doing,
            "state": state,
            "seconds": [None if row.has_moved or row.seconds is None else round(row.seconds, 3) for row in group],
            "step_seconds": [row.step_seconds and round(row.step_seconds, 4) for row in group],
            "lines": [printable(row.sample.line) if row.sample else "" for row in group],
            "hosts": [printable(row.host) for row in group],
            "pids": [row.pid for row in group],
        }
        for (_, doing, state), group in sorted(groups.items(), key=lambda item: (item[0][0], item[1][0].rank))
    ]


def _state(row: Row) -> str:
    """A word on the process; empty if nothing is known of it."""
    if row.has_ended:
        return "ended"
    if row.is_in_debugger or row.process == TRACED:
        return "debugger"
    if row.process == STOPPED:
        return STOPPED
    if row.sample is None:
        return "silent" if row.is_known else ""
    if row.is_advancing:
        return "moving"
    return "" if row.is_busy is None else "busy" if row.is_busy else "idle"


def _stacks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {"ranks": ranks, "stack": list(map(printable, stack))} for stack, ranks in equal_stacks(rows, ())[:_MAX_STACKS]
    ]
