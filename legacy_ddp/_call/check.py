"""The interface of a check, and rows of numbers from a device for checks that do not wait for the device.

A check gives the facts of its rank, and the errors and warnings that follow from the facts of all ranks.

In every call the device computes numbers and copies them to memory of the host: the parts of a row. A part begins and
ends with its serial number. So the host sees that a part is complete by reading memory, without a call of the driver.

Rows are complete at different times on the ranks. So the header of a call carries the number of the newest complete
row of a rank, and in this call all ranks judge the rows up to the lowest of these numbers. A row has the number of its
call, among the calls on which all ranks have agreed. After an agreed error, the next call has the same number, and the
row of the failed call is dropped.
"""

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import torch
from torch import nn

from legacy_ddp._call.pack import Packed
from legacy_ddp._errors import AgreedError
from legacy_ddp._log import warn
from legacy_ddp._memory.plan import Plan, Planner
from legacy_ddp._ranks.agree import Agreement, Precedence
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.header import Header
from legacy_ddp._settings import Settings
from legacy_ddp._steps.backward_counter import BackwardCounter
from legacy_ddp._torch import device as devices

RING_SIZE = 8  # with so many incomplete rows the host waits before it adds another
_serials = count(1)  # of parts


@dataclass(frozen=True)
class Part:
    """Integers of a device in memory of the host: serial, the integers, serial."""

    host: torch.Tensor
    answer: torch.Tensor  # the same on the device, kept so that its memory is not used again before the copy has run
    serial: int

    def is_complete(self) -> bool:
        return int(self.host[0]) == self.serial == int(self.host[-1])

    @property
    def integers(self) -> torch.Tensor:
        """The integers, of 32 bits. Other rows will use their memory again."""
        return self.host[1:-1]


T = TypeVar("T")


@dataclass(frozen=True)
class Row(Generic[T]):
    number: int  # of the call, among the calls on which all ranks have agreed
    subject: T  # what the numbers are about
    parts: Sequence[Part]


class Ring(ABC, Generic[T]):
    """The rows of a wrapper on a process group."""

    def __init__(self) -> None:
        self.agreed = 0  # calls on which all ranks have agreed; equal on all ranks
        self.ready = 0  # number of the newest complete row of this rank
        self.waiting: deque[Row[T]] = deque()  # rows that are not complete
        self._free: list[torch.Tensor] = []  # memory of the host

    @abstractmethod
    def take(self, row: Row[T]) -> None:
        """Read a complete row, whose memory other rows will use again."""

    def begin_part(self, integers: torch.Tensor) -> Part:
        """Start to copy integers, a device tensor of 32 bits and one dimension, to the host. The host does not wait."""
        serial, device = next(_serials) % (2**31 - 1) + 1, integers.device
        end = torch.full((1,), serial, dtype=torch.int32, device=device)
        answer = torch.cat([end, integers, end])
        host = self._memory(answer.numel(), device)
        host.copy_(answer, non_blocking=True)
        return Part(host, answer, serial)

    def add(self, subject: T, parts: Sequence[Part]) -> None:
        """Add the row of the present call, on which the ranks have not agreed yet."""
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
        # A copy of a dropped row may still run here: it ends before the copy of the next row begins.
        index = next((index for index, host in enumerate(self._free) if host.numel() == numel), None)
        return devices.host_numbers(numel, device) if index is None else self._free.pop(index)

    def _release(self, row: Row[T]) -> None:
        self._free = [*self._free, *(part.host for part in row.parts)][-RING_SIZE * max(len(row.parts), 1) :]


@dataclass(frozen=True)
class Subject:
    settings: Settings
    planner: Planner
    wrapper: nn.Module | None  # None for all_reduce_gradients()

    @property
    def wrapper_reference(self) -> Callable[[], nn.Module | None]:
        """A weak reference, because the wrapper refers to its checks."""
        return (lambda: None) if self.wrapper is None else weakref.ref(self.wrapper)


@dataclass(frozen=True, slots=True)
class LocalStep:
    """What this rank brings to a call. ``header``: the facts for the other ranks."""

    call: Call
    plan: Plan
    packed: Packed
    counter: BackwardCounter
    header: Header


ALWAYS = 2**32  # among the flags that a check awaits: no flag of a header


class Check:
    """A check of a set of parameters. A subclass overrides the methods that it needs; the methods here do nothing.

    Every rank has an object of every check, whatever its settings. Settings may differ between ranks. So a decision
    that ranks make together (an error, an exchange) follows only from the facts of all ranks, and from memory that is
    equal on all ranks. One of the facts is a flag that the rank takes part.

    The methods are called in this order: ``facts``, ``mismatch``, ``compare``, ``end``, ``observe``. An error in one of
    them ends the call, and the later methods are not called: what ``facts`` has consumed is then gone.
    """

    precedence = Precedence.OTHER  # the place of the error of mismatch() among such errors
    section = ""  # of docs/errors.md, about the warnings of the check
    # compare() and observe() are called only if some rank has one of these flags. A collective compare() must await the
    # flags that lead to its collective, on every rank and at any time.
    awaits = ALWAYS
    is_on = True  # the settings of this rank want the check, and it was not closed

    def __init__(self, subject: Subject) -> None:
        """Local; may set :attr:`is_on`."""

    def facts(self, step: LocalStep) -> None:
        """Local, before the exchange: write facts of this rank to ``step.header``. An error reaches all ranks."""

    def mismatch(self, rows: Sequence[Header]) -> AgreedError | None:
        """The error that follows from the headers of all ranks. Pure. Called if the headers differ: on every rank,
        also without ``is_on``."""

    def compare(self, step: LocalStep, agreement: Agreement) -> str | None:
        """The text of a warning that every rank finds, None without one. May raise an AgreedError, on all ranks.

        May be collective if the facts of all ranks decide so. No gradient has changed yet.
        """

    def end(self, step: LocalStep) -> None:
        """Local: every parameter has its new gradient."""

    def observe(self, step: LocalStep, agreement: Agreement) -> str | None:
        """The text of a warning of rank 0 alone, None without one. Local. Called after the call, until there is a
        text; an empty text says that there will be none."""

    def begin_forward(self, *, is_training: bool) -> None:
        """Local: a forward of the wrapper begins. Has no effect on the forward."""

    def change_block(self, *, is_open: bool) -> None:
        """Local: the outermost ``no_sync()`` block begins (``is_open``), or has ended."""

    def idle_call(self) -> str | None:
        """Local: a call inside no_sync() did nothing. The text of a warning, None without one."""

    def restart(self) -> None:
        """All ranks got the parameters of one rank: forget earlier differences."""

    def restart_buffers(self) -> None:
        """All ranks hold equal buffers, or should: at construction, and after a broadcast of the buffers."""

    def forget(self) -> None:
        """The gradients since the last call are dropped."""


class Warnings:
    """The warnings of a set of parameters that are shown at the end of the call."""

    def __init__(self) -> None:
        # The rank of the log record, the text, its section, and whether every rank has this text.
        self.pending: list[tuple[int, str, str, bool]] = []

    def add(self, call: Call, text: str, section: str, *, is_everywhere: bool) -> None:
        self.pending.append((call.groups.rank, call.name_in_full(text), section, is_everywhere))

    def emit(self) -> None:
        """Show the pending warnings, at the line of the script that called :meth:`all_reduce`."""
        while self.pending:
            rank, text, section, is_everywhere = self.pending.pop(0)
            warn(rank, text, section, is_everywhere=is_everywhere)
