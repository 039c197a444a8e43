"""Rows of numbers from a device, read without a wait of the host and judged by all ranks in the same later call.

In every call the device computes numbers and copies them, as a part of a row, to memory of the host. A part has its
serial number at both ends: the host sees in memory alone, without a call into the driver, that the part is complete.

Rows are complete at different times on the ranks. So the header of a call carries the newest complete row of a rank,
and all ranks judge the rows up to the lowest of these numbers, in the same call. Rows are numbered by the calls on
which all ranks have agreed: the number of a call is used again after an agreed error, and the row of such a call is
dropped.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import torch

from legacy_ddp._torch import device as devices

RING_SIZE = 8  # rows on the way; with more the host waits
_serials = count(1)  # of parts


@dataclass(frozen=True)
class Part:
    """Integers of a device in memory of the host: serial, the integers, serial.

    ``answer``: the same on the device. Its memory is not used for anything else before the copy has run.
    """

    host: torch.Tensor
    answer: torch.Tensor
    serial: int

    def is_complete(self) -> bool:
        return int(self.host[0]) == self.serial == int(self.host[-1])

    @property
    def integers(self) -> torch.Tensor:
        """The integers, of 32 bits, in memory that is used again for other rows."""
        return self.host[1:-1]


T = TypeVar("T")


@dataclass(frozen=True)
class Row(Generic[T]):
    """The numbers of a call. ``number``: of the call, among the calls on which all ranks have agreed. ``subject``: what
    the numbers are about."""

    number: int
    subject: T
    parts: Sequence[Part]


class Ring(ABC, Generic[T]):
    """The rows of a wrapper on a process group.

    ``agreed``: number of calls on which all ranks have agreed, equal on all ranks. ``ready``: the newest complete row
    of this rank. ``waiting``: rows that are not complete.
    """

    def __init__(self) -> None:
        self.agreed = self.ready = 0
        self.waiting: deque[Row[T]] = deque()
        self._free: list[torch.Tensor] = []  # memory of the host

    @abstractmethod
    def take(self, row: Row[T]) -> None:
        """Read a complete row. Its memory is used again."""

    def begin_part(self, integers: torch.Tensor) -> Part:
        """Copy integers of 32 bits, one dimension on a device, to the host. The host does not wait."""
        serial, device = next(_serials) % (2**31 - 1) + 1, integers.device
        end = torch.full((1,), serial, dtype=torch.int32, device=device)
        answer = torch.cat([end, integers, end])
        host = self._memory(answer.numel(), device)
        host.copy_(answer, non_blocking=True)
        return Part(host, answer, serial)

    def add(self, subject: T, parts: Sequence[Part]) -> None:
        """Add the row of the present call, before the ranks agree on it."""
        if len(self.waiting) >= RING_SIZE:
            self.wait()
        self.waiting.append(Row(self.agreed + 1, subject, parts))

    def drop_failed(self) -> bool:
        """Drop the row of a call on which the ranks did not agree; return whether there was one."""
        has_failed = False
        while self.waiting and self.waiting[-1].number > self.agreed:
            self._release(self.waiting.pop())
            has_failed = True
        return has_failed

    def look(self) -> None:
        while self.waiting and all(part.is_complete() for part in self.waiting[0].parts):
            row = self.waiting.popleft()
            self.ready = row.number
            self.take(row)
            self._release(row)

    def wait(self) -> None:
        self.look()
        for device in {part.answer.device for row in self.waiting for part in row.parts}:
            devices.synchronize(device)
        self.look()

    def _memory(self, numel: int, device: torch.device) -> torch.Tensor:
        """Memory of the host for a part. A late copy of a dropped row ends before that of the next row begins."""
        index = next((index for index, host in enumerate(self._free) if host.numel() == numel), None)
        return devices.host_numbers(numel, device) if index is None else self._free.pop(index)

    def _release(self, row: Row[T]) -> None:
        self._free = [*self._free, *(part.host for part in row.parts)][-RING_SIZE * max(len(row.parts), 1) :]
