"""Evaluation of the status of all ranks: which ranks are missing, and which of them make progress. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from legacy_ddp._watchdog.activity import DEBUGGER, HOOK, OUT_OF_DATA, RUN, Sample
from legacy_ddp._watchdog.client import Outcome
from legacy_ddp._watchdog.processes import DEAD, RUNNING

LEFT_AFTER_LOSS = "left because another rank was lost"
LEFT_NORMALLY = "normally; did it run out of data?"  # the end of an exit reason
# The phases of a call in their order. A rank that has left the call is beyond all phases.
_PHASES = ("plan", "pack", "digest", "agree", RUN, "compare", "metrics", HOOK, "payload", "alias")


@dataclass(frozen=True)
class Row:
    """The known status of a rank.

    ``sample``: None without an answer. ``serial``: calls begun on the group. ``process``: the state of the process in
    the kernel, if a rank on the same machine answered. ``note``: the exit reason, or the error.
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
    is_advancing: bool = False
    is_busy: bool | None = None  # None: not polled twice

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
    def left_after_loss(self) -> bool:
        """Whether the rank left because of the loss of a rank."""
        return self.note.startswith(LEFT_AFTER_LOSS)

    @property
    def left_normally(self) -> bool:
        """Whether the rank left without an error, while other ranks made further calls."""
        return self.note.endswith(LEFT_NORMALLY)

    @property
    def is_in_debugger(self) -> bool:
        """Whether a debugger stopped the rank on purpose and may continue."""
        return self.sample is not None and self.sample.phase == DEBUGGER

    @property
    def is_out_of_data(self) -> bool:
        """Whether the rank waits inside torch's Join, out of data, for calls of the other ranks."""
        return self.sample is not None and self.sample.phase == OUT_OF_DATA and not self.has_ended

    def is_progressing(self, waited_seconds: float) -> bool:
        """Whether the rank advanced between two polls, entered its phase during the wait, or is in a debugger."""
        entered = self.sample is not None and 2 * self.sample.age_seconds < waited_seconds
        return self.is_advancing or entered or self.is_in_debugger


def missing_ranks(rows: Sequence[Row]) -> tuple[int, ...]:
    """The ranks behind the farthest rank in a call; empty if all ranks wait at the same position.

    Beside a rank with a dead process a rank inside a call is not missing. It may wait for the dead rank in an earlier
    call than the farthest rank, for example on the host of the dead rank.
    """
    farthest = max([(0, 0), *(row.progress for row in rows if row.in_call)])
    behind = [row for row in rows if row.progress < farthest and not row.is_out_of_data]
    if any(row.has_ended and not row.left_after_loss for row in behind):
        behind = [row for row in behind if row.has_ended or not row.in_call]
    known = tuple(row.rank for row in behind if row.is_known and not row.left_after_loss)
    unknown = tuple(row.rank for row in behind if not row.is_known)
    # In the order of evidence: known ranks; a single unknown rank; ranks that left after another rank was lost.
    if known or len(unknown) == 1:
        return known or unknown
    return () if unknown else tuple(row.rank for row in behind)


def missing_after_loss(rows: Sequence[Row], lost: Sequence[int], *, was_polled: bool) -> tuple[int, ...]:
    """The ranks in ``lost``; after a poll of all ranks also the missing ranks that did not answer.

    Without a poll other ranks may have left because the loss reached them first. An answering rank is at most late. A
    silent rank with a running process may be late, too: on a crowded machine an answer may take longer than a request
    waits.
    """
    behind = [rows[rank] for rank in missing_ranks(rows) if not rows[rank].left_after_loss] if was_polled else []
    silent = [row.rank for row in behind if row.has_ended or (row.sample is None and row.process != RUNNING)]
    return tuple(sorted({*lost, *silent}))
