"""The status of a rank: its position in calls, and its payloads on devices beyond the end of their calls.

A call with gradients on a device returns while its collectives still run. Behind them, the stream of the device copies
the number of the call to a word of pinned memory. The watchdog reads this word. It never calls the driver, which may
block while another thread of the process waits in it.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum, auto

import torch

from legacy_ddp._torch import device as devices
from legacy_ddp._watchdog.client import (
    Endpoint,
    Failure,
    Message,
    Outcome,
    read_as,
    state_of,
)
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
from legacy_ddp._watchdog.stall import StallWatch, Wait

# Words of a device. Two calls on different streams may complete in another order, so they need different words.
_RING_SIZE = 16
# Pause between two looks at a payload that was reported: its completion is worth a line.
_LOOK_AGAIN_SECONDS = 1.0
_MAX_BEGINS = 16  # kept: the calls of a step, of several wrappers


class Progress(IntEnum):
    NOT_BEGUN = auto()
    ISSUING = auto()  # the host is inside the collectives, for example because the backend connects the devices
    RUNNING = auto()
    COMPLETE = auto()


@dataclass(frozen=True)
class PayloadState:
    """The payloads of a rank, numbered by the calls on the group."""

    begun: int = 0  # the newest
    issued: int = 0  # the newest
    complete: int = 0  # all are complete up to this one
    # The rest is of the oldest payload that is not complete.
    serial: int = 0
    call: str = ""
    devices: str = ""
    seconds: float = 0.0
    is_late: bool = False  # was reported

    def progress(self, serial: int) -> Progress:
        reached = (serial <= self.begun) + (serial <= self.issued) + (serial <= self.complete)
        return Progress(Progress.NOT_BEGUN + reached)


@dataclass
class Payload:
    serial: int
    call: str
    devices: Sequence[torch.device]
    begun_at: float
    words: Sequence[torch.Tensor] = ()  # one for each device; empty until the payload is issued
    is_reported: bool = False
    is_told: bool = False  # this rank has logged the report

    def is_complete(self) -> bool:
        # A device may have written a later call to its word.
        return bool(self.words) and all(int(word) >= self.serial for word in self.words)


class PayloadWatch:
    """The payloads of one rank that may still run. The training thread adds them, threads of the watchdog look."""

    def __init__(self, warn_after_seconds: float) -> None:
        self._warn_after_seconds = warn_after_seconds
        self._words: dict[torch.device, Sequence[torch.Tensor]] = {}
        self._payloads: deque[Payload] = deque()  # the oldest first
        self._begun = self._issued = 0
        self._advanced_at = 0.0  # when a payload was last seen complete
        self._lock = threading.Lock()

    @property
    def is_used(self) -> bool:
        """Whether there was ever a payload on a device."""
        return self._begun > 0

    def begin(self, serial: int, call: str, places: Sequence[torch.device]) -> None:
        """The host begins to issue the payload of call ``serial`` on the devices ``places``."""
        with self._lock:
            # Those that were reported stay: their completion is worth a line, see take_completed().
            while self._payloads and not self._payloads[0].is_reported and self._drop_complete():
                pass
            self._payloads.append(Payload(serial, call, places, time.monotonic()))
            self._begun = serial

    def issue(self) -> None:
        """The payload is issued: each device writes the number of the call after it. The host does not wait."""
        payload = self._payloads[-1]
        words = [self._word(place, payload.serial) for place in payload.devices]
        for place, word in zip(payload.devices, words, strict=True):
            # A new tensor for each call, because the next call may use another stream.
            word.copy_(torch.full((), payload.serial, dtype=torch.int32, device=place), non_blocking=True)
        with self._lock:
            payload.words = words
            self._issued = payload.serial

    def drop_failed(self) -> None:
        """The call has failed: drop its payload if it was not issued."""
        with self._lock:
            if self._payloads and not self._payloads[-1].words:
                self._begun = self._issued
                self._payloads.pop()

    def take_late(self) -> Payload | None:
        """The payload to report now; each is returned once. Only the oldest: later payloads wait for it."""
        with self._lock:
            oldest = self._oldest()
            if oldest is None or oldest.is_reported or self._age(oldest) < self._warn_after_seconds:
                return None
            oldest.is_reported = True
            return oldest

    def take_completed(self) -> list[Payload]:
        with self._lock:
            completed = []
            while oldest := self._drop_complete():
                completed += [oldest] * oldest.is_reported
            return completed

    def seconds_to_look(self) -> float | None:
        """Seconds until a payload may be late; None before the first payload."""
        with self._lock:
            if not self.is_used:
                return None
            oldest = self._oldest()
            if oldest is None:
                return self._warn_after_seconds  # a payload that begins now is not late before
            if oldest.is_reported:
                return _LOOK_AGAIN_SECONDS
            return max(0.0, self._warn_after_seconds - self._age(oldest))

    def state(self) -> PayloadState:
        with self._lock:
            oldest = self._oldest()
            if oldest is None:
                return PayloadState(self._begun, self._issued, complete=self._issued)
            return PayloadState(
                self._begun,
                self._issued,
                complete=oldest.serial - 1,
                serial=oldest.serial,
                call=oldest.call,
                devices=", ".join(map(str, oldest.devices)),
                seconds=self._age(oldest),
                is_late=oldest.is_reported,
            )

    def _oldest(self) -> Payload | None:
        return next((payload for payload in self._payloads if not payload.is_complete()), None)

    def _age(self, oldest: Payload) -> float:
        # The host may be far ahead: count from the completion of an earlier payload.
        return time.monotonic() - max(oldest.begun_at, self._advanced_at)

    def _drop_complete(self) -> Payload | None:
        if not (self._payloads and self._payloads[0].is_complete()):
            return None
        self._advanced_at = time.monotonic()
        return self._payloads.popleft()

    def _word(self, place: torch.device, serial: int) -> torch.Tensor:
        if place not in self._words:
            with torch.inference_mode(False):  # otherwise only inference mode could write to it
                self._words[place] = devices.host_numbers(_RING_SIZE, place).unbind()
        return self._words[place][serial % _RING_SIZE]


LEFT_AFTER_LOSS = "left because another rank was lost"
LEFT_NORMALLY = "left without an error"
AFTER_A_SIGNAL = ", after SIG"
# The phases of a call in their order. A rank that has left the call is beyond all phases.
_PHASES = ("plan", "pack", "digest", "agree", RUN, "compare", "metrics", HOOK, "payload", "alias")


@dataclass(frozen=True)
class Row:
    """The known status of a rank."""

    rank: int
    host: str
    pid: int
    outcome: Outcome
    sample: Sample | None = None  # None without an answer
    serial: int = 0  # calls begun on the group
    in_call: bool = False
    last_call: str = ""
    process: str = ""  # its state in the kernel, if a rank on the same machine answered
    note: str = ""  # the exit reason, or the error
    has_wrapper: bool = True  # False: the group has only calls of the function all_reduce_gradients()
    is_advancing: bool = False
    is_busy: bool | None = None  # None: not polled twice
    payloads: PayloadState = field(default_factory=PayloadState)  # on devices
    wait: Wait | None = None  # in torch.distributed, outside of calls
    step_seconds: float | None = None  # between its last two calls that average gradients
    has_moved: bool = False  # its call or its phase differs between two polls

    @property
    def progress(self) -> tuple[int, int]:
        """Call and phase, comparable between ranks; lowest if unknown, or if the process has ended."""
        if self.sample is None or self.has_ended:
            return (-1, 0)
        if not self.in_call:
            return (self.serial, len(_PHASES))
        return (self.serial, _PHASES.index(self.sample.phase) if self.sample.phase in _PHASES else 0)

    @property
    def seconds(self) -> float | None:
        """Since when the rank does what it does; None if that is not known."""
        if self.sample is None:
            return None
        return self.wait.seconds if self.wait is not None and not self.in_call else self.sample.age_seconds

    @property
    def is_known(self) -> bool:
        was_asked = self.outcome not in (Outcome.NOT_ASKED, Outcome.UNKNOWN)
        return was_asked or bool(self.note) or self.process not in ("", RUNNING)

    @property
    def has_ended(self) -> bool:
        # An earlier answer does not count.
        return self.outcome is Outcome.ENDED or self.process == DEAD

    @property
    def is_silent(self) -> bool:
        # C code may hold up Python. On a crowded machine an answer may take longer than a request waits.
        return self.outcome is Outcome.SILENT and self.process == RUNNING

    @property
    def is_gone(self) -> bool:
        """Whether the rank takes part in no call: its process has ended or is stopped, or it cannot be reached."""
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
    def is_out_of_data(self) -> bool:
        """Whether the rank is out of data, and waits inside torch's Join for the calls of other ranks."""
        return self.sample is not None and self.sample.phase == OUT_OF_DATA and not self.has_ended

    @property
    def is_in_debugger(self) -> bool:
        return self.sample is not None and self.sample.phase == DEBUGGER

    def is_progressing(self, waited_seconds: float) -> bool:
        """Whether the rank advanced between two polls, entered its phase late, or is in a debugger."""
        if self.sample is None:
            return self.is_advancing
        entered = 2 * self.sample.age_seconds < waited_seconds
        return self.is_advancing or entered or self.sample.phase == DEBUGGER


Result = tuple[Outcome, Message | None]  # of a request


@dataclass
class RankStatus:
    """Position of this rank on its group."""

    serial: int = 0  # calls begun, equal on ranks at the same position
    call: str = ""
    in_call: bool = False
    has_wrapper: bool = False
    activity: Activity = field(default_factory=Activity)  # of the call; other threads may do other things
    exit_reasons: dict[int, str] = field(default_factory=dict)  # of neighbours that have left
    payloads: PayloadWatch = field(default_factory=lambda: PayloadWatch(float("inf")))  # on devices
    stall: StallWatch = field(default_factory=lambda: StallWatch(float("inf")))
    begins: deque[tuple[str, float]] = field(default_factory=lambda: deque(maxlen=_MAX_BEGINS))  # the last calls

    def step_seconds(self) -> float | None:
        """Seconds between the begins of the last two calls of a wrapper that average gradients; None if not known."""
        last: dict[str, float] = {}
        for call, since in reversed(self.begins.copy()):
            label, _, rest = call.partition(" call ")
            kind = f"{label} {rest.partition(' ')[2]}"  # with the wrapper, without the number
            if kind in last:
                return last[kind] - since
            if label.startswith("all_reduce"):
                last[kind] = since
        return None


@dataclass
class GroupView:
    """The ranks of a group, as known to this rank."""

    own: Endpoint
    peers: Sequence[Endpoint | None]
    global_ranks: Sequence[int]  # of every rank, counted in the job
    job_size: int  # the ranks of the job
    status: RankStatus = field(default_factory=RankStatus)

    def others(self, ranks: Iterable[int]) -> list[Endpoint]:
        """The known endpoints of ``ranks``, without this rank."""
        return [peer for rank in ranks if rank != self.own.rank and (peer := self.peers[rank]) is not None]

    def local_rows(self, failure: Failure | None) -> list[Row]:
        """The rows of all ranks without a poll: from the status of this rank, and the ranks lost by ``failure``."""
        # It is known that the lost ranks left. What the kernel shows of their processes is in the status of this rank.
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
        "note": "",
        "has_wrapper": status.has_wrapper,
        "payloads": asdict(status.payloads.state()),
        "step_seconds": status.step_seconds(),
        "wait": None if (wait := status.stall.wait()) is None else asdict(wait),
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
        note=answer["note"],
        has_wrapper=answer["has_wrapper"],
        payloads=read_as(PayloadState, answer["payloads"]),
        wait=read_as(Wait, answer["wait"]) if answer["wait"] else None,
        step_seconds=answer["step_seconds"],
    )
