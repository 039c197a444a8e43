"""What does every rank say of itself, and the kernel of it? One row per rank, made here or gathered from everybody."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from legacy_ddp._watchdog.activity import HERE, Activity, Sample
from legacy_ddp._watchdog.client import Message, Outcome, Peer, ask_all
from legacy_ddp._watchdog.processes import DEAD, RUNNING, moved_bytes, state_of
from legacy_ddp._watchdog.report import Row

# Two looks at a rank, this far apart, tell whether it gets on.
_SECOND_LOOK_SECONDS = 0.3
# Between two looks; less is no checkpoint that is being written but other threads, and the looking itself.
_MANY_BYTES = 2**20
# Of one core: a rank that waits needs next to nothing, one that computes gets most of a core, or its share of it.
_BUSY_SHARE = 0.1


@dataclass
class Place:
    """Where this rank is on its group. ``serial``: calls begun there, equal on ranks that are at the same place."""

    serial: int = 0
    call: str = ""
    in_call: bool = False
    activity: Activity = field(default_factory=Activity)  # in a call; other threads may do other things meanwhile
    goodbyes: dict[int, str] = field(default_factory=dict)  # last words of neighbours


def own_state(place: Place, peers: Sequence[Peer | None]) -> Message:
    """What this rank answers when it is asked for its state; JSON."""
    seen = {str(peer.rank): state_of(peer.identity) for peer in peers if peer is not None}
    return {
        "sample": asdict((place.activity if place.in_call else HERE).sample()),
        "serial": place.serial,
        "in_call": place.in_call,
        "call": place.call,
        "moved_bytes": moved_bytes(),
        "cpu_seconds": time.process_time(),
        "clock_seconds": time.monotonic(),
        "seen": {rank: state for rank, state in seen.items() if state},
        "goodbyes": {str(rank): text for rank, text in place.goodbyes.items()},
    }


def ask_everybody(peers: Sequence[Peer | None], me: Peer, *, twice: bool) -> list[Row]:
    """Every rank's row. ``twice``: look a second time, to see who gets on."""
    known = [peer for peer in peers if peer is not None]
    first = ask_all(known, {"ask": "state"}, me.identity)
    if not twice:
        unclear = _unclear(rows_of(peers, first))
        again = ask_all([peer for peer in known if peer.rank in unclear], {"ask": "state"}, me.identity)
        return rows_of(peers, {**first, **{rank: answer for rank, answer in again.items() if answer[1]}})
    time.sleep(_SECOND_LOOK_SECONDS)
    second = ask_all([peer for peer in known if first[peer.rank][1]], {"ask": "state"}, me.identity)
    return [_with_both(row, first[row.rank][1], second.get(row.rank)) for row in rows_of(peers, {**first, **second})]


def _unclear(rows: Sequence[Row]) -> set[int]:
    """The ranks whose second answer may change the report.

    The neighbours of a rank that ended: its exit reason may have reached them after their first answer. A silent rank
    whose process runs: on a crowded machine an answer may take longer than one question waits for it.
    """
    ended = [row.rank for row in rows if row.has_ended and not row.note]
    neighbours = {(rank + step) % len(rows) for rank in ended for step in (-1, 1)}
    answering = {row.rank for row in rows if row.outcome is Outcome.ANSWERED}
    silent = {row.rank for row in rows if row.outcome is Outcome.SILENT and row.process == RUNNING}
    return (neighbours & answering) | silent


def rows_of(peers: Sequence[Peer | None], answers: Mapping[int, tuple[Outcome, Message | None]]) -> list[Row]:
    """A row for every rank, from the answers there are: ranks also tell what they see of their machine's others."""
    said = [answer for _, answer in answers.values() if answer]
    seen = {int(rank): state for answer in said for rank, state in answer["seen"].items()}
    goodbyes = {int(rank): text for answer in said for rank, text in answer["goodbyes"].items()}
    rows = []
    for rank, peer in enumerate(peers):
        outcome, answer = answers.get(rank, (Outcome.NOT_ASKED if peer else Outcome.DEAF, None))
        if seen.get(rank) == DEAD:  # it may have answered and ended since
            outcome, answer = Outcome.GONE, None
        row = Row(rank, peer.identity.host if peer else "?", peer.identity.pid if peer else 0, outcome)
        row = replace(row, process=seen.get(rank, ""), note="" if answer else goodbyes.get(rank, ""))
        rows.append(_with_answer(row, answer) if answer else row)
    return rows


def _with_answer(row: Row, answer: Message) -> Row:
    sample = Sample(**{**answer["sample"], "stack": tuple(answer["sample"]["stack"])})
    return replace(row, sample=sample, serial=answer["serial"], in_call=answer["in_call"], last_call=answer["call"])


def _with_both(row: Row, before: Message | None, later: tuple[Outcome, Message | None] | None) -> Row:
    """What two looks at a rank show: whether it gets on, and whether it computes."""
    after = later[1] if later else None
    if row.sample is None or before is None or after is None:
        return row
    busy_seconds = after["cpu_seconds"] - before["cpu_seconds"]
    is_busy = busy_seconds > _BUSY_SHARE * (after["clock_seconds"] - before["clock_seconds"])
    return replace(row, is_advancing=_gets_on(before, after), is_busy=is_busy)


def _gets_on(before: Message, after: Message) -> bool:
    """Whether a rank entered or left something meanwhile, stands at another line, or reads or writes a file."""
    then, now = ((said["serial"], said["sample"]["changes"], said["sample"]["stack"]) for said in (before, after))
    return then != now or after["moved_bytes"] - before["moved_bytes"] >= _MANY_BYTES
