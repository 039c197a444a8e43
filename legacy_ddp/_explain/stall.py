"""The report on ranks that wait in ``torch.distributed``, outside of the calls of this library. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from legacy_ddp._explain.missing import MIN_WAIT_SECONDS, ranks_by_state, reason, report_text, reporters
from legacy_ddp._text import name_ranks, printable
from legacy_ddp._watchdog.ending import was_asked
from legacy_ddp._watchdog.reports import Report
from legacy_ddp._watchdog.stall import Wait
from legacy_ddp._watchdog.status import Row

OUTSIDE = "outside"  # the phase of such a report
_NOBODY_MISSING = "all of them are there; look at the network between them"
_TWO_LINES = "all of them are there, at different lines; look at the network between them"
_NO_MESSAGE = "{} wait for messages that no other sends or takes"
_EACH_OTHER = "they wait for each other: make the same collectives in the same order on every rank"


class _Collective(NamedTuple):
    """What ranks wait in.

    ``of``: the ranks of the group, where it is not the whole job, as text. ``source``: counted in the job.
    """

    function: str
    of: str
    source: int


class _Place(NamedTuple):
    """Where ranks wait."""

    collective: _Collective
    line: str


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
        places.setdefault(_Place(_collective(wait, numbers), wait.line), []).append(rank)
    absent = [row for row in rows if row.rank in _expected(waits, numbers) and row.rank not in waits]
    if any(was_asked(row.note) for row in absent):
        return None
    hint = [] if absent else [_hint(waits, places, numbers, job_size - len(rows))]
    if [*global_ranks] != [*range(len(rows))]:
        all_here = f"{name_ranks(range(len(rows)))} of the wrapper's process group"
        hint.append(f"{all_here} {'is' if len(rows) == 1 else 'are'} {name_ranks(global_ranks)} of the job")
    seconds = {place: f" {max(waits[rank].seconds for rank in ranks):.0f} s" for place, ranks in places.items()}
    waited = [_describe(place, ranks, numbers, seconds[place]) for place, ranks in places.items()]
    head = f"outside of calls: {'; '.join([*waited, *_describe_absent(absent, _doing), *hint])}"
    # Equal as long as nothing has changed: without seconds, and without the lines of a rank that moves on.
    lasting = [_describe(place, ranks, numbers) for place, ranks in places.items()]
    summary = "; ".join([*lasting, *_describe_absent(absent, _state)])
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


def _is_beyond(wait: Wait, numbers: Mapping[int, int]) -> bool:
    """Whether the wait may be for ranks of the job that are not in ``numbers``."""
    if wait.source >= 0:
        return wait.source not in numbers
    return not wait.ranks or not numbers.keys() >= {*wait.ranks}


def _hint(
    waits: Mapping[int, Wait], places: Mapping[_Place, Sequence[int]], numbers: Mapping[int, int], unseen: int
) -> str:
    """What may be wrong where no rank is missing. ``unseen``: ranks of the job that are not in ``numbers``."""
    if unseen and any(_is_beyond(wait, numbers) for wait in waits.values()):
        ranks = "the other rank" if unseen == 1 else f"the other {unseen} ranks"
        return (
            f"every rank of the wrapper's process group is there; {ranks} of the job may be missing: run legacy-ddp "
            f"watch on {'its host' if unseen == 1 else 'their hosts'}"
        )
    ranks_in: dict[_Collective, list[int]] = {}
    for place, ranks_there in places.items():
        ranks_in.setdefault(place.collective, []).extend(ranks_there)
    complete = [
        (collective, ranks)
        for collective, ranks in ranks_in.items()
        if _expected({rank: waits[rank] for rank in ranks}, numbers) <= {*ranks}
    ]
    if not complete:
        circle = _circle(waits, numbers)
        return _NO_MESSAGE.format(name_ranks(circle)) if circle else _EACH_OTHER
    if len(ranks_in) == 1:
        return _NOBODY_MISSING if len(places) == 1 else _TWO_LINES
    collective, ranks_there = complete[0]
    first = f"all of {name_ranks(sorted(ranks_there))} are in {collective.function}()"
    return f"{first}: look at the network between them first"


def _circle(waits: Mapping[int, Wait], numbers: Mapping[int, int]) -> list[int]:
    """The ranks that wait for messages of each other. Other ranks may wait for these."""
    awaited = {rank: numbers[wait.source] for rank, wait in waits.items() if wait.source in numbers}
    while outside := [rank for rank, source in awaited.items() if source not in awaited]:
        for rank in outside:
            del awaited[rank]
    if not awaited:
        return []
    rank = min(awaited)
    for _ in awaited:  # the first steps may lead to the circle
        rank = awaited[rank]
    circle = [rank]
    while (rank := awaited[rank]) != circle[0]:
        circle.append(rank)
    return sorted(circle)


def _collective(wait: Wait, numbers: Mapping[int, int]) -> _Collective:
    of = [numbers[rank] for rank in wait.ranks if rank in numbers]
    text = f" of {name_ranks(of)}" if of and len(of) < len(numbers) else ""
    return _Collective(wait.function, text, wait.source)


def _expected(waits: Mapping[int, Wait], numbers: Mapping[int, int]) -> set[int]:
    """The ranks that the waiting ranks wait for, and themselves: of the groups, where these are known."""
    expected: set[int] = set()
    for wait in waits.values():
        of = (wait.source,) if wait.source >= 0 else wait.ranks or numbers
        expected |= {numbers[rank] for rank in of if rank in numbers}
    return expected


def _describe(place: _Place, ranks: Sequence[int], numbers: Mapping[int, int], seconds: str = "") -> str:
    function, of, source = place.collective
    peer = ""
    if source in numbers:
        peer = f" for rank {numbers[source]}"
    elif source >= 0:
        peer = f" for rank {source} of the job, outside of the wrapper's process group,"
    verb = "has" if len(ranks) == 1 else "have"
    return f"{name_ranks(ranks)} {verb} waited{seconds} in {function}(){of}{peer} at {place.line}"


def _describe_absent(absent: Sequence[Row], describe: Callable[[Row], str]) -> list[str]:
    groups: dict[str, list[int]] = {}
    for row in absent:
        groups.setdefault(describe(row), []).append(row.rank)
    return [
        f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} not there: {what}" for what, ranks in groups.items()
    ]


def _doing(row: Row) -> str:
    if row.sample is None or not row.sample.line or row.note or row.is_gone or row.is_silent:
        return reason(row)
    if row.is_in_debugger:
        return f"at {row.sample.line}, in a debugger"
    return f"at {row.sample.line}, {'busy' if row.is_advancing or row.is_busy else 'idle'}"


def _state(row: Row) -> str:
    """As :func:`_doing`, but for a rank that moves on without its line."""
    return "busy" if row.is_advancing or row.is_busy else _doing(row)
