"""The status of all ranks, by polls between them, and which ranks are missing."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from legacy_ddp._watchdog.client import (
    Endpoint,
    Failure,
    Message,
    Outcome,
    read_as,
    state_of,
)
from legacy_ddp._watchdog.payloads import PayloadState, PayloadWatch
from legacy_ddp._watchdog.process import (
    DEAD,
    DEBUGGER,
    HOOK,
    OUT_OF_DATA,
    RUN,
    RUNNING,
    Activity,
    Sample,
    busy_seconds,
    moved_bytes,
    process_activity,
    waits_for_disk,
)

LEFT_AFTER_LOSS = "left because another rank was lost"
LEFT_NORMALLY = "left without an error"
AFTER_A_SIGNAL = ", after SIG"
# The phases of a call in their order. A rank that has left the call is beyond all phases.
_PHASES = ("plan", "pack", "digest", "agree", RUN, "compare", "metrics", HOOK, "payload", "alias")


@dataclass(frozen=True)
class Row:
    """The known status of a rank.

    ``sample``: None without an answer. ``serial``: calls begun on the group. ``process``: the state of the process in
    the kernel, if a rank on the same machine answered. ``note``: the exit reason, or the error. ``has_wrapper``: false
    if only the function ``all_reduce_gradients()`` made calls on the group.
    """

    rank: int
    host: str
    pid: int
    outcome: Outcome
    sample: Sample | None = None
    serial: int = 0
    in_call: bool = False
    last_call: str = ""
    process: str = ""
    note: str = ""
    has_wrapper: bool = True
    is_advancing: bool = False
    is_busy: bool | None = None  # None: not polled twice
    payloads: PayloadState = field(default_factory=PayloadState)  # on devices

    @property
    def progress(self) -> tuple[int, int]:
        """Call and phase, comparable between ranks; below all ranks if unknown or if the process has ended."""
        if self.sample is None or self.has_ended:
            return (-1, 0)
        if not self.in_call:
            return (self.serial, len(_PHASES))
        return (self.serial, _PHASES.index(self.sample.phase) if self.sample.phase in _PHASES else 0)

    @property
    def is_known(self) -> bool:
        """Whether there is any evidence about this rank."""
        was_asked = self.outcome not in (Outcome.NOT_ASKED, Outcome.UNKNOWN)
        return was_asked or bool(self.note) or self.process not in ("", RUNNING)

    @property
    def has_ended(self) -> bool:
        """Whether the process is dead; an earlier answer does not count."""
        return self.outcome is Outcome.ENDED or self.process == DEAD

    @property
    def is_silent(self) -> bool:
        """Whether the rank does not answer although its process runs.

        Python may be held up by C code. On a crowded machine an answer may take longer than a request waits.
        """
        return self.outcome is Outcome.SILENT and self.process == RUNNING

    @property
    def is_gone(self) -> bool:
        """Whether the rank can take part in no call: its process ended or is stopped, or it cannot be reached."""
        return self.has_ended or (self.sample is None and self.is_known and not self.is_silent)

    @property
    def left_after_loss(self) -> bool:
        return self.note.startswith(LEFT_AFTER_LOSS)

    @property
    def left_normally(self) -> bool:
        return self.note.startswith(LEFT_NORMALLY)

    @property
    def left_after_a_signal(self) -> bool:
        return self.left_normally and AFTER_A_SIGNAL in self.note

    @property
    def is_in_debugger(self) -> bool:
        return self.sample is not None and self.sample.phase == DEBUGGER

    @property
    def is_out_of_data(self) -> bool:
        """Whether the rank waits inside torch's Join, out of data, for calls of the other ranks."""
        return self.sample is not None and self.sample.phase == OUT_OF_DATA and not self.has_ended

    def is_progressing(self, waited_seconds: float) -> bool:
        """Whether the rank moves on: it advanced between two polls, or entered its phase late, or is in a debugger."""
        entered = self.sample is not None and 2 * self.sample.age_seconds < waited_seconds
        return self.is_advancing or entered or self.is_in_debugger


Result = tuple[Outcome, Message | None]  # of a request


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


def build_rows(peers: Sequence[Endpoint | None], results: Mapping[int, Result]) -> list[Row]:
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
