"""The status of this rank, and the polls by which this rank asks all ranks for their status."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from legacy_ddp._watchdog.activity import Activity, Sample, process_activity
from legacy_ddp._watchdog.client import (
    Endpoint,
    Failure,
    Message,
    Outcome,
    read_as,
    request_all,
    state_of,
)
from legacy_ddp._watchdog.missing import Row
from legacy_ddp._watchdog.payloads import PayloadState, PayloadWatch
from legacy_ddp._watchdog.process import DEAD, busy_seconds, moved_bytes, waits_for_disk

# Pause between two polls; the difference of the answers shows whether a rank is advancing.
_SECOND_POLL_SECONDS = 0.3
# Between two polls. A checkpoint moves more bytes; less comes from other threads, and from the polls.
_MANY_BYTES = 2**20
# Of one core: a waiting rank needs next to nothing, a computing rank gets most of a core, or its share of one.
_BUSY_SHARE = 0.1
_CLOSED = (Outcome.CLOSED, Outcome.STRANGER)
_Result = tuple[Outcome, Message | None]  # of a request


@dataclass
class RankStatus:
    """Position of this rank on its group. ``serial``: calls begun, equal on ranks at the same position."""

    serial: int = 0
    call: str = ""
    in_call: bool = False
    has_wrapper: bool = False
    activity: Activity = field(default_factory=Activity)  # of the call; other threads may be busy with other things
    exit_reasons: dict[int, str] = field(default_factory=dict)  # of neighbours that have left
    payloads: PayloadWatch = field(default_factory=lambda: PayloadWatch(float("inf")))  # on devices


@dataclass
class GroupView:
    """The ranks of a group, as known to this rank. ``peers``, by rank: None without a status server."""

    own: Endpoint
    peers: Sequence[Endpoint | None]
    status: RankStatus = field(default_factory=RankStatus)

    def others(self, ranks: Iterable[int]) -> list[Endpoint]:
        """The known endpoints of ``ranks``, without this rank."""
        return [peer for rank in ranks if rank != self.own.rank and (peer := self.peers[rank]) is not None]

    def local_rows(self, failure: Failure | None) -> list[Row]:
        """The rows of all ranks without a poll: the status of this rank, and the ranks lost by ``failure``.

        Of these no more is known than that they left; what the kernel shows of their processes is in the status.
        """
        answers = {self.own.rank: (Outcome.ANSWERED, own_status(self.status, self.peers))}
        lost = dict.fromkeys(failure.ranks if failure else (), (Outcome.LEFT, None))
        return build_rows(self.peers, {**lost, **answers})


def own_status(status: RankStatus, peers: Sequence[Endpoint | None]) -> Message:
    """The answer of this rank to a status request, ready for JSON."""
    states = {str(peer.rank): state_of(peer) for peer in peers if peer is not None}
    return {
        "sample": asdict((status.activity if status.in_call else process_activity).sample()),
        "serial": status.serial,
        "in_call": status.in_call,
        "call": status.call,
        "has_wrapper": status.has_wrapper,
        "payloads": asdict(status.payloads.state()),
        "moved_bytes": moved_bytes(),
        "busy_seconds": busy_seconds(),
        "waits_for_disk": waits_for_disk(),
        "clock_seconds": time.monotonic(),
        "process_states": {rank: state for rank, state in states.items() if state},
        "exit_reasons": {str(rank): text for rank, text in status.exit_reasons.items()},
    }


def poll_ranks(peers: Sequence[Endpoint | None], own: Endpoint, *, twice: bool) -> list[Row]:
    """The rows of all ranks. ``twice``: poll all ranks again after a pause, to see which ranks are advancing."""
    known = [peer for peer in peers if peer is not None]
    first = request_all(known, {"request": "status"}, own.identity)
    unclear = _unclear(build_rows(peers, first))
    if twice:
        time.sleep(_SECOND_POLL_SECONDS)
        unclear |= {rank for rank, (_, answer) in first.items() if answer}
    second = request_all([peer for peer in known if peer.rank in unclear], {"request": "status"}, own.identity)
    rows = build_rows(peers, {**first, **{rank: result for rank, result in second.items() if twice or result[1]}})
    return [_with_progress(row, first.get(row.rank), second.get(row.rank)) for row in rows] if twice else rows


def _unclear(rows: Sequence[Row]) -> set[int]:
    """The ranks whose second answer may change the report.

    The neighbours of an ended rank: the exit reason may have arrived after their first answer. A silent rank with a
    running process: on a crowded machine an answer may take longer than a request waits.
    """
    ended = [row.rank for row in rows if (row.has_ended or row.outcome in _CLOSED) and not row.note]
    neighbours = {(rank + step) % len(rows) for rank in ended for step in (-1, 1)}
    answering = {row.rank for row in rows if row.outcome is Outcome.ANSWERED}
    return (neighbours & answering) | {row.rank for row in rows if row.is_silent}


def build_rows(peers: Sequence[Endpoint | None], results: Mapping[int, _Result]) -> list[Row]:
    """A row per rank. The answer of one rank also holds process states and exit reasons of other ranks."""
    answers = [answer for _, answer in results.values() if answer]
    states = {int(rank): state for answer in answers for rank, state in answer["process_states"].items()}
    exit_reasons = {int(rank): text for answer in answers for rank, text in answer["exit_reasons"].items()}
    rows = []
    for rank, peer in enumerate(peers):
        outcome, answer = results.get(rank, (Outcome.NOT_ASKED if peer else Outcome.UNKNOWN, None))
        if states.get(rank) == DEAD:  # the process may have ended after its answer
            outcome, answer = Outcome.ENDED, None
        row = Row(rank, peer.identity.host if peer else "?", peer.identity.pid if peer else 0, outcome)
        row = replace(row, process=states.get(rank, ""), note="" if answer else exit_reasons.get(rank, ""))
        rows.append(_with_answer(row, answer) if answer else row)
    return rows


def _with_answer(row: Row, answer: Message) -> Row:
    return replace(
        row,
        sample=read_as(Sample, answer["sample"]),
        serial=answer["serial"],
        in_call=answer["in_call"],
        last_call=answer["call"],
        has_wrapper=answer["has_wrapper"],
        payloads=read_as(PayloadState, answer["payloads"]),
    )


def _with_progress(row: Row, first: _Result | None, second: _Result | None) -> Row:
    """The row with ``is_advancing`` and ``is_busy``, from the answers to two polls."""
    before, after = first and first[1], second and second[1]
    if row.sample is None or not before or not after:
        return row
    busy = after["busy_seconds"] - before["busy_seconds"]
    is_busy = busy > _BUSY_SHARE * (after["clock_seconds"] - before["clock_seconds"])
    is_busy |= before["waits_for_disk"] or after["waits_for_disk"]  # a thread that saves a checkpoint
    return replace(row, is_advancing=_is_advancing(before, after), is_busy=is_busy)


def _is_advancing(before: Message, after: Message) -> bool:
    """Whether between two answers the call, the phase or the stack changed, or many bytes were read or written."""
    old, new = (
        (answer["serial"], answer["sample"]["changes"], answer["sample"]["stack"]) for answer in (before, after)
    )
    return old != new or after["moved_bytes"] - before["moved_bytes"] >= _MANY_BYTES
