"""The report on ranks that wait in ``torch.distributed``, outside of the calls of this library. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from legacy_ddp._explain.missing import ranks_by_state, reason, report_text, reporters
from legacy_ddp._text import name_ranks, printable
from legacy_ddp._watchdog.reports import Report
from legacy_ddp._watchdog.stall import Wait
from legacy_ddp._watchdog.status import Row

OUTSIDE = "outside"  # the phase of such a report
# The time between two polls is longer, so such a wait has begun before the first.
MIN_WAIT_SECONDS = 0.25
_NOBODY_MISSING = "all of them are there; look at the network between them"
_EACH_OTHER = "they wait for each other: make the same collectives in the same order on every rank"


class _Place(NamedTuple):
    """Where ranks wait: ``of``: the ranks of the group, where it is not the whole job, as text."""

    function: str
    line: str
    of: str
    source: int


def compose_stall(rows: Sequence[Row], global_ranks: Sequence[int], job_size: int) -> Report | None:
    """The report; None if no rank waits, or if a rank is in a call of the library, which then reports itself.

    ``global_ranks``: of every row, counted in the job of ``job_size`` ranks. The others have no wrapper on this group.
    """
    numbers = {rank: number for number, rank in enumerate(global_ranks)}
    # Not is_advancing, which counts the bytes of other threads: a rank may wait and write a checkpoint.
    waits = {row.rank: row.wait for row in rows if row.wait is not None and row.wait.seconds >= MIN_WAIT_SECONDS}
    if not waits or any(row.in_call for row in rows):
        return None
    places: dict[_Place, list[int]] = {}
    for rank, wait in waits.items():
        places.setdefault(_place(wait, numbers), []).append(rank)
    absent = [row for row in rows if row.rank in _expected(waits, numbers) and row.rank not in waits]
    is_beyond = any(not wait.ranks or not numbers.keys() >= {*wait.ranks} for wait in waits.values())
    others = [_others(job_size - len(rows))] if is_beyond and job_size > len(rows) else []
    nobody = [] if absent else [_EACH_OTHER] if len(places) > 1 else [] if others else [_NOBODY_MISSING]
    waited = [
        _describe(place, ranks, f"waited {max(waits[rank].seconds for rank in ranks):.0f} s")
        for place, ranks in places.items()
    ]
    head = f"outside of calls: {'; '.join([*waited, *_describe_absent(absent, _doing), *nobody, *others])}"
    # Equal as long as nothing has changed: without seconds, and without the lines of a rank that moves on.
    summary = "; ".join(
        [*(_describe(place, ranks, "waited") for place, ranks in places.items()), *_describe_absent(absent, _state)]
    )
    missing = tuple(row.rank for row in absent)
    return Report(
        head=printable(head),
        text=report_text(rows, missing, head),
        summary=printable(summary),
        missing=missing,
        reporters=reporters([row for row in rows if row.sample is not None] or rows, (), ()),
        is_progressing=bool(absent) and all(row.is_in_debugger for row in absent),
        is_busy=bool(absent) and all(row.is_busy or row.is_advancing or row.is_in_debugger for row in absent),
        phase=OUTSIDE,
        seconds=round(max(wait.seconds for wait in waits.values()), 3),
        states=ranks_by_state(rows, missing),
    )


def _others(number: int) -> str:
    ranks = "1 other rank" if number == 1 else f"{number} other ranks"
    return f"{ranks} of the job {'is' if number == 1 else 'are'} outside of this process group, and not seen from here"


def _place(wait: Wait, numbers: Mapping[int, int]) -> _Place:
    of = [numbers[rank] for rank in wait.ranks if rank in numbers]
    text = f" of {name_ranks(of)}" if of and len(of) < len(numbers) else ""
    return _Place(wait.function, wait.line, text, numbers.get(wait.source, -1))


def _expected(waits: Mapping[int, Wait], numbers: Mapping[int, int]) -> set[int]:
    """The ranks that the waiting ranks wait for, and themselves: of the groups, where these are known."""
    expected: set[int] = set()
    for wait in waits.values():
        if wait.source in numbers:
            expected.add(numbers[wait.source])
        else:
            expected |= {numbers[rank] for rank in wait.ranks or numbers if rank in numbers}
    return expected


def _describe(place: _Place, ranks: Sequence[int], waited: str) -> str:
    verb = f"has {waited}" if len(ranks) == 1 else f"have {waited}"
    source = f" for rank {place.source}" if place.source >= 0 else ""
    return f"{name_ranks(ranks)} {verb} in {place.function}(){place.of}{source} at {place.line}"


def _describe_absent(absent: Sequence[Row], describe: Callable[[Row], str]) -> list[str]:
    groups: dict[str, list[int]] = {}
    for row in absent:
        groups.setdefault(describe(row), []).append(row.rank)
    return [
        f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} not there: {what}" for what, ranks in groups.items()
    ]


def _doing(row: Row) -> str:
    if row.sample is None or not row.sample.line or row.is_gone or row.is_silent:
        return reason(row)
    if row.is_in_debugger:
        return f"at {row.sample.line}, in a debugger"
    return f"at {row.sample.line}, {'busy' if row.is_advancing or row.is_busy else 'idle'}"


def _state(row: Row) -> str:
    """As :func:`_doing`, but for a rank that moves on without its line."""
    return "busy" if row.is_advancing or row.is_busy else _doing(row)
