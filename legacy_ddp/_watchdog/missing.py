"""Which ranks are missing: the known status of every rank, and the evidence that a rank is missing. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto

from legacy_ddp._watchdog.activity import DEBUGGER, HOOK, OUT_OF_DATA, RUN, Sample
from legacy_ddp._watchdog.client import Outcome
from legacy_ddp._watchdog.payloads import PayloadState
from legacy_ddp._watchdog.process import DEAD, RUNNING

LEFT_AFTER_LOSS = "left because another rank was lost"
LEFT_NORMALLY = "left without an error"
AFTER_A_SIGNAL = ", after SIG"
# The phases of a call in their order. A rank that has left the call is beyond all phases.
_PHASES = ("plan", "pack", "digest", "agree", RUN, "compare", "metrics", HOOK, "payload", "alias")
# The phases in which a rank waits for the other ranks, and runs no code of the user.
_WAITING_PHASES = ("agree", "compare", "metrics", "payload")


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
        """Whether the rank left because of the loss of a rank."""
        return self.note.startswith(LEFT_AFTER_LOSS)

    @property
    def left_normally(self) -> bool:
        """Whether the rank left without an error, while other ranks made further calls."""
        return self.note.startswith(LEFT_NORMALLY)

    @property
    def left_after_a_signal(self) -> bool:
        """Whether the rank left by itself, after a signal."""
        return self.left_normally and AFTER_A_SIGNAL in self.note

    @property
    def is_in_debugger(self) -> bool:
        """Whether a debugger stopped the rank on purpose and may continue."""
        return self.sample is not None and self.sample.phase == DEBUGGER

    @property
    def is_out_of_data(self) -> bool:
        """Whether the rank waits inside torch's Join, out of data, for calls of the other ranks."""
        return self.sample is not None and self.sample.phase == OUT_OF_DATA and not self.has_ended

    def is_progressing(self, waited_seconds: float) -> bool:
        """Whether the rank moves on: it advanced between two polls, or entered its phase late, or is in a debugger."""
        entered = self.sample is not None and 2 * self.sample.age_seconds < waited_seconds
        return self.is_advancing or entered or self.is_in_debugger


class _Evidence(IntEnum):
    """What a rank behind the farthest rank shows, the strongest evidence of a missing rank first."""

    ABSENT = auto()  # gone, outside of the call, or in a phase of the call that waits for no rank
    SILENT = auto()  # no answer: held up by C code, or on a crowded machine
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
        # A rank inside a call is then not missing. It waits for the rank that is gone, perhaps in an earlier phase or
        # call than the farthest rank: on the host of a dead rank, or because the network broke in mid-exchange.
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
    is_waiting = row.in_call and row.sample is not None and row.sample.phase in _WAITING_PHASES
    return _Evidence.WAITING if is_waiting and not row.has_ended else _Evidence.ABSENT


def missing_after_loss(rows: Sequence[Row], lost: Sequence[int], *, was_polled: bool) -> tuple[int, ...]:
    """The ranks in ``lost``; after a poll of all ranks also the missing ranks that did not answer.

    Without a poll other ranks may have left because the loss reached them first. A rank that answers, or whose process
    runs, may be late.
    """
    behind = [rows[rank] for rank in missing_ranks(rows) if not rows[rank].left_after_loss] if was_polled else []
    return tuple(sorted({*lost, *(row.rank for row in behind if row.is_gone)}))
