"""The missing ranks of a waiting or failed call: the poll of all ranks, the decision, and the report of 80 columns."""

import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from enum import IntEnum, auto
from typing import Any

from legacy_ddp._steps.policy import closure_advice
from legacy_ddp._text import WIDTH, first_few, name_ranks, printable, printable_lines, wrap
from legacy_ddp._watchdog.client import Endpoint, Failure, Message, Outcome, request_all
from legacy_ddp._watchdog.process import AT_END, DEAD, HOOK, RUN, RUNNING, STOPPED, TRACED, USER_CODE, Sample
from legacy_ddp._watchdog.reports import Report
from legacy_ddp._watchdog.stall import Wait
from legacy_ddp._watchdog.status import Progress, Result, Row, build_rows

MAX_ROWS = 24
MAX_STACKS = 8
MAX_PARTS = 4
# Of a wait outside of calls. The time between two polls is longer, so such a wait has begun before the first.
MIN_WAIT_SECONDS = 0.25
_MAX_RANK_COLUMNS = 10  # of a table; longer lists of ranks move their line to the right
# In the JSON of a report, which travels in one message: 2,000 ranks with as many stacks must not exceed MAX_BYTES.
_MAX_KEPT_STACKS = 64
# Phases of a call in which user code runs.
_USER_CODE = {HOOK: "its communication hook", RUN: "its run() of a cross-check"}
# The state of a process that no rank sees: it is on another machine, hidden, or in other namespaces.
_UNSEEN = {Outcome.ANSWERED: "answers", Outcome.NOT_ASKED: "unknown", Outcome.UNKNOWN: "unknown"}
# The phases in which a rank waits for the other ranks, and runs no code of the user.
WAITING_PHASES = ("agree", "compare", "metrics", "payload")
# The flight recorder of torch for NCCL; the names of newer versions first.
_RECORDER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RECORDER_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# Pause between two polls; the difference of the answers shows whether a rank is advancing.
SECOND_POLL_SECONDS = 0.3
# Between two polls. A checkpoint moves more bytes; less comes from other threads, and from the polls.
_MANY_BYTES = 2**20
# Of one core: a waiting rank needs next to nothing, a computing rank gets most of a core, or its share of one.
_BUSY_SHARE = 0.1
_CLOSED = (Outcome.CLOSED, Outcome.STRANGER)
_PROGRESS = {
    Progress.COMPLETE: "complete on",
    Progress.RUNNING: "running on",
    Progress.ISSUING: "being issued on",
    Progress.NOT_BEGUN: "not begun on",
}


def compose(rows: Sequence[Row], failure: Failure | None = None, *, was_polled: bool = True) -> Report:
    """The report on the farthest call, after a failure or a long wait. ``was_polled``: ``rows`` are from a poll."""
    failure = failure or Failure("")
    missing = missing_after_loss(rows, failure.ranks, was_polled=was_polled) if failure.ranks else missing_ranks(rows)
    waiting = [row for row in rows if row.sample is not None and row.in_call and row.rank not in missing]
    waited_seconds = max((row.sample.age_seconds for row in waiting if row.sample), default=0.0)
    summary = _summary(rows, missing)
    reason = failure.reason or f"ranks have waited for {waited_seconds:.1f} s"
    farthest = max(rows, key=lambda row: (row.in_call, row.progress))
    head = f"{_late_payload(rows)}{_position(farthest)}: {reason}; {summary}"
    progressing = [rows[rank].is_progressing(waited_seconds) for rank in missing]
    return Report(
        head=printable(head),
        text=report_text(rows, missing, head, [*_advice(rows, missing), *_closures(waiting)]),
        summary=printable(summary),
        missing=missing,
        is_progressing=bool(missing) and all(progressing),
        is_busy=bool(missing) and all(on or rows[rank].is_busy for rank, on in zip(missing, progressing, strict=True)),
        reporters=reporters(rows, waiting, missing),
        is_late=failure.is_late,
        call=farthest.last_call,
        phase=farthest.sample.phase if farthest.in_call and farthest.sample else "",
        seconds=round(waited_seconds, 3),
        states=ranks_by_state(rows, missing),
    )


def compose_payload(rows: Sequence[Row], call: str, serial: int) -> Report:
    """The report on the payload of ``call``, number ``serial`` on the group: it takes long on devices."""
    progress = {row.rank: row.payloads.progress(serial) for row in rows if row.sample is not None}
    gone = [row.rank for row in rows if row.is_gone]
    farthest = min(max(progress.values(), default=Progress.NOT_BEGUN), Progress.RUNNING)
    behind = [rank for rank, reached in progress.items() if reached < farthest]
    missing = tuple(gone or behind or [row.rank for row in rows if row.is_silent])
    if missing:
        summary = _summary(rows, missing)
    elif farthest is Progress.ISSUING:
        summary = "every rank is issuing it; the backend may still be connecting the devices"
    else:
        summary = "no rank is missing, every rank has issued it; look at the network between the devices"
    not_complete = (Progress.ISSUING, Progress.RUNNING)
    waiting = [row for row in rows if progress.get(row.rank) in not_complete and row.rank not in missing]
    head = f"{call}: {_payload_text(waiting)}; {summary}"
    ranks = {reached: [rank for rank, other in progress.items() if other is reached] for reached in _PROGRESS}
    states = [f"{text} {name_ranks(ranks[reached])}" for reached, text in _PROGRESS.items() if ranks[reached]]
    return Report(
        head=printable(head),
        text=report_text(rows, missing, head, [*_wrap(f"the payload is {', '.join(states)}"), *_wrap(recorder_text())]),
        summary=printable(summary),
        missing=missing,
        reporters=reporters(rows, waiting, missing),
        call=call,
        phase="payload",
        states=ranks_by_state(rows, missing),
    )


def report_text(rows: Sequence[Row], missing: Sequence[int], head: str, notes: Sequence[str] = ()) -> str:
    lines = [*_wrap(head), *notes, "", *_table(rows, missing), *_stacks(rows, missing)]
    return printable_lines("\n".join(lines))


def format_loss(row: Row, reason: str, missing: str = "") -> str:
    """A line on a loss, with the position of the rank in ``row``.

    ``missing``: the ranks that may be lost, if ``reason`` does not name them.
    """
    position = f"{name_ranks([row.rank])} is in {_position(row) if row.in_call and row.sample else activity_text(row)}"
    if row.sample and row.sample.stack and row.sample.phase != AT_END:  # where a frame is one of Python or torch
        position += f", at {row.sample.line or row.sample.stack[-1]}"
    parts = [reason, missing, position] if missing else [reason, position]
    return printable(" ".join("; ".join(parts).split()))


def process_text(row: Row) -> str:
    if row.has_ended:
        return DEAD
    process = row.process or _UNSEEN.get(row.outcome, "not visible")
    return process if row.is_busy is None else f"{process}, {'busy' if row.is_busy else 'idle'}"


def activity_text(row: Row) -> str:
    if row.has_ended:
        return str(Outcome.ENDED)
    if row.sample is None:
        return str(row.outcome)
    if row.in_call:
        return f"{row.last_call}: {row.sample.phase}"
    if row.sample.call:
        return f"{row.sample.call} of another group: {row.sample.phase}"
    if row.wait is not None and row.sample.phase == USER_CODE:
        return f"{row.wait.function}() after {row.last_call}" if row.last_call else f"{row.wait.function}()"
    return f"{row.sample.phase} after {row.last_call}" if row.last_call else row.sample.phase


def _late_payload(rows: Sequence[Row]) -> str:
    """The start of a report if an earlier payload was reported and still runs on a device; otherwise empty."""
    late = [row for row in rows if row.payloads.is_late]
    if not late:
        return ""
    oldest = min(late, key=lambda row: row.payloads.serial).payloads
    return f"{oldest.call}: {_payload_text([row for row in late if row.payloads.serial == oldest.serial])}; "


def _payload_text(rows: Sequence[Row]) -> str:
    seconds = max((row.payloads.seconds for row in rows), default=0.0)
    ranks: dict[str, list[int]] = {}
    for row in rows:
        ranks.setdefault(row.payloads.devices, []).append(row.rank)
    parts = [f"{name_ranks(of_device)} ({device})" for device, of_device in ranks.items()]
    shown = ", ".join(first_few(parts, MAX_PARTS, "... {} other devices"))
    return f"the payload is not complete after {seconds:.1f} s on {shown}"


def _position(row: Row) -> str:
    return f"{row.last_call}, phase {row.sample.phase}" if row.in_call and row.sample else row.last_call


def _summary(rows: Sequence[Row], missing: Sequence[int]) -> str:
    """The missing ranks, each with a reason, or a hint if no rank is missing."""
    if not missing and (unknown := [row.rank for row in rows if not row.is_known]):
        return f"the missing rank is not known: no rank asked {name_ranks(unknown)}"
    phases = {row.sample.phase if row.sample else "" for row in rows}
    if not missing and len(phases) == 1 and (place := _USER_CODE.get(phases.pop())):
        return f"no rank is missing, every rank is in {place}; look at what it waits for"
    if not missing:
        where = "every rank is in this call" if all(row.in_call for row in rows) else "no rank is behind this call"
        return f"no rank is missing, {where}; look at the network between them"
    groups: dict[str, list[int]] = {}
    for rank in missing:
        groups.setdefault(reason(rows[rank]), []).append(rank)
    parts = [f"{name_ranks(ranks)} ({why}{_hosts(rows, ranks)})" for why, ranks in groups.items()]
    parts = first_few(parts, MAX_PARTS, "... {} other kinds")
    if silent := [row.rank for row in rows if row.is_silent and row.rank not in missing]:
        parts.append(f"no answer from {name_ranks(silent)}")
    return "missing " + "; ".join(parts)


def _advice(rows: Sequence[Row], missing: Sequence[int]) -> list[str]:
    return [*_advice_on_order(rows, missing), *_advice_on_ends(rows, missing)]


def _advice_on_order(rows: Sequence[Row], missing: Sequence[int]) -> list[str]:
    """On missing ranks in a collective of the script that waits for all ranks, and so for the ranks in the call."""
    waits = {rank: wait for rank in missing if (wait := rows[rank].wait) is not None}
    if len(waits) < len(missing) or not all(map(_is_for_all, waits.values())):
        return []  # one of them may be the reason why the others wait
    functions = " and ".join(dict.fromkeys(f"{wait.function}()" for wait in waits.values()))
    verb = "waits" if len(waits) == 1 else "wait"
    return _wrap(
        f"{name_ranks(waits)} {verb} in {functions} for the ranks in this call, and these for {name_ranks(waits)}: "
        "make the same calls and collectives in the same order on every rank. Possible reasons: a rank left the loop "
        "alone (early stopping, a batch less); a collective is under a condition such as if rank == 0, for instance a "
        "metric that gathers",
        indent=0,
    )


def _is_for_all(wait: Wait) -> bool:
    return wait.is_for_all and wait.seconds >= MIN_WAIT_SECONDS


def _advice_on_ends(rows: Sequence[Row], missing: Sequence[int]) -> list[str]:
    ranks = [rank for rank in missing if rows[rank].left_normally]
    if not ranks:
        return []
    has_wrapper = any(row.has_wrapper for row in rows if row.sample)
    call = "all_reduce()" if has_wrapper else "all_reduce_gradients()"
    stop = (
        f'let all ranks stop in the same call: pass metrics={{"stop": 1 or 0}} in every {call}, and leave the loop on '
        'every rank where record.metrics["stop"] is not 0'
    )
    if all(rows[rank].left_after_a_signal for rank in ranks):
        return _wrap(f"{name_ranks(ranks)} made fewer calls, because it stopped alone: {stop}", indent=0)
    reasons = (
        f"it stopped alone (a signal, early stopping, an error that its script caught): {stop}",
        f'it left out a whole step (continue before the call): pass metrics={{"step": step}} in every {call}, and '
        'compare record.metrics["step"] with step * world size; they differ from the first such step on',
        "a call is under a condition (if rank == 0): make every call on all ranks",
        "it started from another checkpoint or step number: load the same file on all ranks",
        "it had a batch less: give every rank as many batches (a sampler, drop_last=True)"
        f"{', or use model.join()' if has_wrapper else ''}",
    )
    lines = _wrap(f"{name_ranks(ranks)} made fewer calls. Possible reasons:", indent=0)
    return [*lines, *(line for reason in reasons for line in _wrap(f"- {reason}"))]


def _closures(waiting: Sequence[Row]) -> list[str]:
    """Advice on ranks that wait in a closure. Other ranks may have left the closure."""
    owners: dict[str, list[int]] = {}
    for row in waiting:
        if row.sample and row.sample.closure:
            owners.setdefault(row.sample.closure, []).append(row.rank)
    return [
        line for owner, ranks in owners.items() for line in _wrap(closure_advice(name_ranks(ranks), owner), indent=0)
    ]


def reason(row: Row) -> str:
    if row.process in (STOPPED, TRACED):
        return f"its process is {row.process}"
    if row.outcome is Outcome.SILENT and row.process == RUNNING:
        return "its process is running but does not answer: Python may be held up by C code"
    if row.note and row.sample:  # at the exit of its process
        return f"{row.note}; its process goes on{_location(row.sample)}"
    work = row.sample.local_work if row.sample and not row.in_call else ""
    return row.note or f"{activity_text(row)}{_location(row.sample)}{work and f'; {work}'}"


def _location(sample: Sample | None) -> str:
    """The user's own line, and the innermost frame if that is in a library."""
    if sample is None or not sample.stack:
        return ""
    innermost = sample.stack[-1]
    if sample.line in ("", innermost):
        return f", at {innermost}"
    return f", at {sample.line}, inside {innermost}"


def _hosts(rows: Sequence[Row], ranks: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(rows[rank].host for rank in ranks if rows[rank].pid))
    return f", on host{'s' if len(hosts) > 1 else ''} {', '.join(first_few(hosts, MAX_PARTS))}" if hosts else ""


def _table(rows: Sequence[Row], missing: Sequence[int]) -> list[str]:
    """A line for each of the first missing ranks, then a line for all ranks of equal activity and process."""
    alone, behind = {*missing[:MAX_ROWS]}, {*missing}
    groups: dict[object, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.rank not in behind, row.rank)):
        shared = (row.rank in behind, activity_text(row), process_text(row))
        groups.setdefault(row.rank if row.rank in alone else shared, []).append(row)
    names = [name_ranks(row.rank for row in group).partition(" ")[2] for group in groups.values()]
    width = max(len(name) for name in ("     ", *names) if len(name) <= _MAX_RANK_COLUMNS)
    lines = [f"{'rank':>{width}}  {'doing':38}{'for':>8}  process on host:pid"]
    for name, group in zip(names, groups.values(), strict=True):
        lines += _wrap(f"{name:>{width}}  {_describe(group)}", indent=width + 4)
    return lines


def _describe(group: Sequence[Row]) -> str:
    """What ranks of equal activity and process do, and on which hosts; of one rank also the process."""
    first, *others = group
    ages = sorted(row.seconds for row in group if row.seconds is not None)
    age = "-".join(dict.fromkeys(f"{seconds:.1f}" for seconds in (*ages[:1], *ages[-1:])))
    hosts = list(dict.fromkeys(row.host for row in group))
    where = ", ".join(first_few(hosts, MAX_PARTS)) if others else f"{first.host}:{first.pid}"
    return f"{activity_text(first):37} {(age and f'{age} s') or '?':>8}  {process_text(first)} on {where}"


def reporters(rows: Sequence[Row], waiting: Iterable[Row], missing: Collection[int]) -> tuple[int, ...]:
    """A rank of each host: the lowest waiting rank, else the lowest rank that may wait later."""
    in_wait, behind = {row.rank for row in waiting}, {*missing}
    ordered = sorted(rows, key=lambda row: (row.rank not in in_wait, row.is_gone, row.rank in behind, row.rank))
    return tuple(sorted({row.host: row.rank for row in reversed(ordered)}.values()))


def ranks_by_state(rows: Sequence[Row], missing: Collection[int]) -> list[dict[str, Any]]:
    """The ranks by equal state, the missing ranks and the rarest states first; lists are in the order of ``ranks``."""
    behind = {*missing}
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        sample = row.sample and (row.sample.stack, row.sample.line, row.sample.phase)
        key = (row.rank in behind, row.serial, activity_text(row), process_text(row), row.outcome, row.note, sample)
        groups.setdefault(key, []).append(row)
    ordered = sorted(groups.values(), key=lambda group: (group[0].rank not in behind, len(group)))
    return [_state(group, keeps_stack=place < _MAX_KEPT_STACKS) for place, group in enumerate(ordered)]


def _state(group: Sequence[Row], *, keeps_stack: bool) -> dict[str, Any]:
    first = group[0]
    return {
        "ranks": [row.rank for row in group],
        "activity": printable(activity_text(first)),
        "process": process_text(first),
        "answer": str(first.outcome),
        "note": printable(first.note),
        "calls": first.serial,
        "line": printable(first.sample.line) if first.sample else "",
        "stack": [printable(frame) for frame in first.sample.stack] if first.sample and keeps_stack else None,
        "seconds": [None if row.seconds is None else round(row.seconds, 3) for row in group],
        "hosts": [printable(row.host) for row in group],
        "pids": [row.pid for row in group],
    }


def equal_stacks(rows: Sequence[Row], missing: Collection[int]) -> list[tuple[tuple[str, ...], list[int]]]:
    """Each Python stack with its ranks. The rarest are first, because they are the likeliest cause."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        if row.sample is not None and row.sample.stack:
            groups.setdefault(row.sample.stack, []).append(row.rank)
    return sorted(groups.items(), key=lambda item: (len(item[1]), item[1][0] not in missing, item[1]))


def _stacks(rows: Sequence[Row], missing: Collection[int]) -> list[str]:
    lines = []
    ordered = equal_stacks(rows, missing)
    for stack, ranks in ordered[:MAX_STACKS]:
        lines += ["", *_wrap(f"stack of {name_ranks(ranks)}, innermost last:"), *(f"  {frame}" for frame in stack)]
    if len(ordered) > MAX_STACKS:
        left = sorted(rank for _, ranks in ordered[MAX_STACKS:] for rank in ranks)
        lines += ["", *_wrap(f"... other stacks of {name_ranks(left)}")]
    return lines


def _wrap(text: str, indent: int = 2) -> list[str]:
    # Paths stay whole, so that a user can copy them.
    return wrap(" ".join(text.splitlines()), deeper=" " * indent, columns=WIDTH, break_words=False)


class _Evidence(IntEnum):
    """Evidence that a rank behind the farthest rank is missing. The strongest evidence is first."""

    ABSENT = auto()  # gone, outside of the call, or in a phase of the call that waits for no rank
    SILENT = auto()
    WAITING = auto()  # for the other ranks, in an earlier phase or call
    UNKNOWN = auto()
    LEFT_AFTER_LOSS = auto()


def missing_ranks(rows: Sequence[Row]) -> tuple[int, ...]:
    """The missing ranks: of all ranks behind the farthest rank in a call, the ranks with the strongest evidence.

    Empty if all ranks wait at the same position, or if several ranks are behind and nothing is known of them.
    """
    farthest = max([(0, 0), *(row.progress for row in rows if row.in_call)])
    behind = [row for row in rows if row.progress < farthest and not row.is_out_of_data]
    if any(row.is_gone and not row.left_after_loss for row in behind):
        # Then a rank inside a call is not missing: it waits for the rank that is gone. Its phase or call may be before
        # that of the farthest rank: it is on the host of a dead rank, or the network failed during an exchange.
        behind = [row for row in behind if row.is_gone or not row.in_call]
    strongest = min((_evidence(row) for row in behind), default=None)
    missing = tuple(row.rank for row in behind if _evidence(row) is strongest)
    return () if strongest is _Evidence.UNKNOWN and len(missing) > 1 else missing


def _evidence(row: Row) -> _Evidence:
    if row.left_after_loss:
        return _Evidence.LEFT_AFTER_LOSS
    if not row.is_known:
        return _Evidence.UNKNOWN
    if row.is_silent:
        return _Evidence.SILENT
    is_waiting = row.in_call and row.sample is not None and row.sample.phase in WAITING_PHASES
    return _Evidence.WAITING if is_waiting and not row.has_ended else _Evidence.ABSENT


def missing_after_loss(rows: Sequence[Row], lost: Sequence[int], *, was_polled: bool) -> tuple[int, ...]:
    """The ranks in ``lost``; after a poll of all ranks also the missing ranks that are gone."""
    # Without a poll, other ranks may have left because the loss reached them first. A rank that answers, or whose
    # process runs, may be late.
    behind = [rows[rank] for rank in missing_ranks(rows) if not rows[rank].left_after_loss] if was_polled else []
    return tuple(sorted({*lost, *(row.rank for row in behind if row.is_gone)}))


def poll_ranks(peers: Sequence[Endpoint | None], own: Endpoint, *, twice: bool) -> list[Row]:
    """The rows of all ranks. ``twice``: poll all ranks again after a pause, to see which ranks are advancing."""
    known = [peer for peer in peers if peer is not None]
    first = request_all(known, {"request": "status"}, own.identity)
    unclear = _unclear(build_rows(peers, first))
    if twice:
        time.sleep(SECOND_POLL_SECONDS)
        unclear |= {rank for rank, (_, answer) in first.items() if answer}
    second = request_all([peer for peer in known if peer.rank in unclear], {"request": "status"}, own.identity)
    rows = build_rows(peers, {**first, **{rank: result for rank, result in second.items() if twice or result[1]}})
    return [_with_progress(row, first.get(row.rank), second.get(row.rank)) for row in rows] if twice else rows


def _unclear(rows: Sequence[Row]) -> set[int]:
    """The ranks whose second answer may change the report: neighbours of ended ranks, and silent ranks."""
    # The exit reason of an ended rank may have reached its neighbours after their first answer.
    ended = [row.rank for row in rows if (row.has_ended or row.outcome in _CLOSED) and not row.note]
    neighbours = {(rank + step) % len(rows) for rank in ended for step in (-1, 1)}
    answering = {row.rank for row in rows if row.outcome is Outcome.ANSWERED}
    return (neighbours & answering) | {row.rank for row in rows if row.is_silent}


def _with_progress(row: Row, first: Result | None, second: Result | None) -> Row:
    """The row with ``is_advancing`` and ``is_busy``, from the answers to two polls."""
    before, after = first and first[1], second and second[1]
    if row.sample is None or not before or not after:
        return row
    busy = after["busy_seconds"] - before["busy_seconds"]
    is_busy = busy > _BUSY_SHARE * (after["clock_seconds"] - before["clock_seconds"])
    is_busy |= before["waits_for_disk"] or after["waits_for_disk"]  # a thread that saves a checkpoint
    has_moved = _position_in(before) != _position_in(after)
    return replace(row, is_advancing=_is_advancing(before, after), is_busy=is_busy, has_moved=has_moved)


def _position_in(answer: Message) -> tuple[int, bool, int]:
    return answer["serial"], answer["in_call"], answer["sample"]["changes"]


def _is_advancing(before: Message, after: Message) -> bool:
    """Whether between two answers the call, the phase or the stack changed, or many bytes were read or written."""
    old, new = (
        (answer["serial"], answer["sample"]["changes"], answer["sample"]["stack"]) for answer in (before, after)
    )
    return old != new or after["moved_bytes"] - before["moved_bytes"] >= _MANY_BYTES


def recorder_text() -> str:
    """Where torch's flight recorder for NCCL leaves its dump; empty if the environment does not switch it on."""
    environment = os.environ
    if next((environment[name] for name in _RECORDER_SIZES if name in environment), "0") == "0":
        return ""
    prefix = next((environment[name] for name in _RECORDER_FILES if name in environment), "")
    where = f"{prefix}RANK" if prefix else f"the file that torch chooses ({_RECORDER_FILES[-1]} sets it)"
    return f"torch's flight recorder is on: at the timeout of the process group its dump goes to {where}"
