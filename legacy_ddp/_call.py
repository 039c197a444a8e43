"""One collective call of ours on this rank: its place in the sequence, its clock, and its way to the others."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from legacy_ddp._errors import LegacyDDPError
from legacy_ddp._groups import Groups, Place, check_usable
from legacy_ddp._header import Operation


@dataclass
class Seat:
    """A wrapper's place in a group: its number there and how many calls of each kind it has completed."""

    groups: Groups
    member: int
    calls: Counter[Operation] = field(default_factory=Counter)
    waited_seconds: float = 0.0


class Call:
    """Context of one call: one at a time per group; counts the call when it succeeds.

    Raises:
        LegacyDDPError: another call on this group is under way in this process.
        LostPeerError: an earlier failure left the group unusable.
    """

    def __init__(self, seat: Seat, operation: Operation, timeout: timedelta) -> None:
        self.seat = seat
        self.groups = seat.groups
        self.operation = operation
        self.number = seat.calls[operation] + 1
        self.timeout = timeout
        self.seconds: dict[str, float] = {}
        self._phase = ""

    def __enter__(self) -> "Call":
        if not self.groups.busy.acquire(blocking=False):
            raise LegacyDDPError(
                f"{self.operation}: another call on this process group is under way in this process, expected one at a "
                "time; call from one thread, and not from a signal handler"
            )
        try:
            check_usable(self.groups)
        except BaseException:
            self.groups.busy.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.groups.busy.release()
        if error is None:
            self.seat.calls[self.operation] = self.number

    @property
    def place(self) -> Place:
        """Where the call is now."""
        return Place(str(self.operation), self.number, self._phase)

    @contextmanager
    def phase(self, name: str, *, exposed: bool = False) -> Iterator[None]:
        """Time a phase. In an ``exposed`` one others may be waiting for us, so whatever breaks it breaks the group."""
        self._phase = name
        start = time.perf_counter()
        try:
            yield
        except LegacyDDPError:
            raise
        except BaseException as error:
            if exposed:
                self.groups.lost = error
            raise
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Collective: a host tensor of every rank, shape (size, *row.shape)."""
        return self.groups.gather(row, timeout=self.timeout, place=self.place)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Collective: the bytes of every rank."""
        return self.groups.gather_bytes(data, timeout=self.timeout, place=self.place)

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: element-wise maximum over the ranks, in place."""
        return self.groups.maximum(values, timeout=self.timeout, place=self.place)

    def wait(self, work: Any, device: torch.device) -> None:
        """Wait for an operation on tensors of ``device``, started on the payload group for them."""
        self.groups.wait(work, timeout=self.timeout, place=self.place, device=device)
