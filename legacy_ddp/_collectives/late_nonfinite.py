"""Non-finite gradients on a device, found without a wait of the host and told some calls later.

``Checks(nonfinite="warn")`` must not stop the host for a device. In every call the device finds out which gradients
have NaN or infinity, and copies the answer, a row, to memory of the host. The row has its number at both ends: the host
sees in memory alone, without a call into the driver, that a row is complete.

Rows are complete at different times on the ranks. So the header of a call carries the number of the newest complete row
of a rank, and a bit for each of its last rows: whether it has a non-finite gradient. All ranks judge the rows up to the
lowest of these numbers, in the same call. Rows are numbered by the calls on which all ranks have agreed: the number of
a call is used again after an agreed error, and the row of such a call is dropped.

Rows that no later call has judged are judged in check_replicas() and broadcast_parameters(), with a wait, or told by
each rank as its process ends.
"""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, count

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._agreement.agree import Agreement
from legacy_ddp._agreement.header import Flag
from legacy_ddp._buckets.flat_buffer import DENSE
from legacy_ddp._collectives.check_interface import Check, LocalStep, Subject
from legacy_ddp._collectives.nonfinite import (
    MAX_NAMES,
    NonFinite,
    describe_nonfinite,
    describe_rank,
    inspect,
    may_overflow,
)
from legacy_ddp._log import warn
from legacy_ddp._step_guard.step_counter import knows_scalers
from legacy_ddp._text import error_line
from legacy_ddp._torch import device as devices
from legacy_ddp._transport.call import Call
from legacy_ddp._transport.private_groups import Groups

RING_SIZE = 8  # rows on the way; with more the host waits
_WINDOW = 16  # bits in the header: more than rows can be on the way on one rank and judged on another
_serials = count(1)  # of rows; the number at their ends


@dataclass(frozen=True)
class _Part:
    """The answer of a device for gradients of one dtype, in memory of the host: serial, a number for each name, serial.

    The number is 1 for a non-finite gradient.
    """

    names: Sequence[str]
    host: torch.Tensor
    device: torch.device
    serial: int

    def is_complete(self) -> bool:
        return int(self.host[0]) == self.serial == int(self.host[-1])

    def bad_names(self) -> list[str]:
        return [name for name, is_bad in zip(self.names, self.host[1:-1].tolist(), strict=True) if is_bad]


@dataclass(frozen=True)
class _Row:
    """The answers about a call. ``number``: of the call, among the calls on which all ranks have agreed."""

    number: int
    call_name: str
    parts: Sequence[_Part]

    def details(self) -> NonFinite:
        bad = [name for part in self.parts for name in part.bad_names()]
        present = sum(len(part.names) for part in self.parts)
        return NonFinite(dict.fromkeys(bad[:MAX_NAMES], ()), len(bad), present)


@dataclass
class _Ring:
    """The rows of a wrapper on a process group.

    ``agreed``: number of calls on which all ranks have agreed. ``judged``: the newest judged row. ``ready``: the newest
    complete row of this rank. ``waiting``: rows that are not complete. ``bad``: the details of complete rows with a
    non-finite gradient that are not judged. ``is_told``: a warning was given, and no later call was finite on all
    ranks. All ranks have the same ``agreed``, ``judged`` and ``is_told``.
    """

    rank: int
    agreed: int = 0
    judged: int = 0
    ready: int = 0
    is_told: bool = False
    waiting: deque[_Row] = field(default_factory=deque)
    bad: dict[int, NonFinite] = field(default_factory=dict)
    call_names: dict[int, str] = field(default_factory=dict)  # of the calls that are not judged
    free: list[torch.Tensor] = field(default_factory=list)  # memory of the host

    def add(self, row: _Row) -> None:
        """Add the row of the present call, before the ranks agree on it."""
        if len(self.waiting) >= RING_SIZE:
            self.wait()
        self.waiting.append(row)

    def drop_failed(self) -> None:
        """Drop the row of a call on which the ranks did not agree."""
        while self.waiting and self.waiting[-1].number > self.agreed:
            self._release(self.waiting.pop())

    def look(self) -> None:
        """Take the complete rows."""
        while self.waiting and all(part.is_complete() for part in self.waiting[0].parts):
            row = self.waiting.popleft()
            self.ready = row.number
            if row.number > self.judged and (details := row.details()).bad_grads:
                self.bad[row.number] = details
            self._release(row)

    def wait(self) -> None:
        """Wait until all rows are complete."""
        for device in {part.device for row in self.waiting for part in row.parts}:
            devices.synchronize(device)
        self.look()

    @property
    def word(self) -> int:
        """What the header of this rank carries: ``ready``, and the bit of each of the last rows."""
        bits = sum(1 << self.ready - number for number in self.bad if self.ready - number < _WINDOW)
        return self.ready << _WINDOW | bits

    def memory(self, numel: int, device: torch.device) -> torch.Tensor:
        """Memory of the host for a part. A late copy of a dropped row ends before that of the next row begins."""
        index = next((index for index, host in enumerate(self.free) if host.numel() == numel), None)
        return devices.host_numbers(numel, device) if index is None else self.free.pop(index)

    def _release(self, row: _Row) -> None:
        self.free = [*self.free, *(part.host for part in row.parts)][-RING_SIZE * max(len(row.parts), 1) :]


class LateNonFiniteGradients(Check):
    """Warns of non-finite gradients on a device, some calls later. Not collective while all gradients are finite."""

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.nonfinite_policy == "warn"
        self._rings: weakref.WeakKeyDictionary[Groups, _Ring] = weakref.WeakKeyDictionary()
        self._has_searched_scalers = False
        self._is_unable = False

    def facts(self, step: LocalStep) -> None:
        if step.plan.layout.is_on_cpu:
            return
        call, header = step.call, step.header
        ring = self._rings.get(call.groups)
        if ring is None:
            ring = self._rings[call.groups] = _Ring(call.groups.rank)
            weakref.finalize(call.groups, _tell_rest, ring)  # also as the process ends
        ring.drop_failed()
        ring.look()
        parts = self._begin(step, ring) if header.takes_part and not self._is_unable else ()
        ring.add(_Row(ring.agreed + 1, str(call), parts))
        header.gradients = ring.word

    def compare(self, step: LocalStep, agreement: Agreement) -> str | None:
        """Collective only if a header shows a non-finite gradient and no earlier call of the same streak has warned."""
        if step.plan.layout.is_on_cpu:
            return None
        call, ring = step.call, self._rings[step.call.groups]
        ring.agreed += 1
        ring.call_names[ring.agreed] = str(call)
        is_common = bool(agreement.common_flags & Flag.WATCHED)
        return self._judge(call, ring, agreement.column("gradients") if is_common else [])

    def flush_flag(self, groups: Groups) -> int:
        """The flag of the header of an operation that may flush: this rank has rows that are not judged."""
        ring = self._rings.get(groups)
        return Flag.WATCHED if ring is not None and ring.judged < ring.agreed else 0

    def flush(self, call: Call) -> str | None:
        """Collective: wait for all rows, and judge them. For ranks that all have the flag; the text of a warning."""
        ring = self._rings[call.groups]
        ring.drop_failed()
        ring.wait()
        words = call.gather(torch.tensor([ring.word], device="cpu")).flatten().tolist()
        return self._judge(call, ring, words)

    def _begin(self, step: LocalStep, ring: _Ring) -> list[_Part]:
        """Let the devices find the non-finite gradients, and copy the answers to the host. The host does not wait."""
        try:
            return _begin_parts(step, ring)
        except (RuntimeError, TypeError) as error:  # a backend without one of the operations
            self._is_unable = True
            text = (
                f"{step.call}: gradients on this device cannot be searched for NaN and infinity ({error_line(error)}); "
                'not tried again; see Checks(nonfinite="raise")'
            )
            warn(step.call.groups.rank, text)
            return []

    def _judge(self, call: Call, ring: _Ring, words: Sequence[int]) -> str | None:
        """Judge the rows that are complete on all ranks. ``words``: of all ranks; empty if a rank has no such check."""
        newest = min((word >> _WINDOW for word in words), default=ring.agreed)
        newest = max(newest, ring.agreed - _WINDOW)
        texts = []
        for number in range(ring.judged + 1, newest + 1):
            ranks = [rank for rank, word in enumerate(words) if _has_bit(word, number)]
            name, details = ring.call_names.pop(number), ring.bad.pop(number, NonFinite({}))
            if not ranks:
                ring.is_told = False
            elif not ring.is_told and (text := self._report(call, name, ranks, details)):
                ring.is_told = True
                texts.append(text)
        ring.judged = max(ring.judged, newest)
        return "\n".join(texts) or None

    def _report(self, call: Call, name: str, ranks: Sequence[int], details: NonFinite) -> str | None:
        """Collective: the text about the call ``name``; None if GradScalers explain the gradients on all ranks.

        The scales are the present scales: they may have come down since.
        """
        with call.phase("agree"):
            own = inspect(call, lambda: details, search=not self._has_searched_scalers)
            self._has_searched_scalers = True
            found = [NonFinite(**of_rank) for of_rank in call.gather_objects(asdict(own))]
        if all(may_overflow(details.scale) for details in found):
            return None
        return describe_nonfinite(name, ranks, found, reaction="warn", found_in=str(call))


def _has_bit(word: int, number: int) -> bool:
    """Whether the word of a rank says that its row ``number`` has a non-finite gradient."""
    age = (word >> _WINDOW) - number
    return 0 <= age < _WINDOW and bool(word >> age & 1)


def _gradients(step: LocalStep) -> Iterator[tuple[str, torch.Tensor]]:
    """The elements of every gradient. The views of the slots exist already: new views would cost the host much time."""
    plan, packed = step.plan, step.packed
    if packed.sparse or any(flat is not buffer.flat for buffer, flat in zip(plan.buffers, packed.flats, strict=True)):
        for name, grad in packed.grads(plan):
            if grad is not None:
                yield name, grad.values() if grad.is_sparse else grad
        return
    views = chain.from_iterable(buffer.views.tensors for buffer in plan.buffers)
    for slot, kind, view in zip(plan.layout.slots, packed.kinds, views, strict=True):
        if kind == DENSE:
            yield slot.name, view


def _begin_parts(step: LocalStep, ring: _Ring) -> list[_Part]:
    alike: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    for name, values in _gradients(step):
        if values.numel():
            real = torch.view_as_real(values) if values.is_complex() else values
            alike.setdefault((real.device, real.dtype), {})[name] = real
    serial, parts = next(_serials) % (2**31 - 1) + 1, []
    for (device, _), grads in alike.items():
        # The greatest magnitude: unlike a sum of squares, it is finite if and only if all elements are.
        greatest = torch.stack(internals.foreach_norm(list(grads.values()), float("inf")))
        end = torch.full((1,), serial, dtype=torch.int32, device=device)
        answer = torch.cat([end, torch.isfinite(greatest).logical_not().to(torch.int32), end])
        host = ring.memory(answer.numel(), device)
        host.copy_(answer, non_blocking=True)
        parts.append(_Part(tuple(grads), host, device, serial))
    return parts


def _tell_rest(ring: _Ring) -> None:
    """Tell the first complete row of this rank that no call has judged. A device is not asked: it may be lost.

    Not beside a GradScaler, which may have skipped the step: its scale would have to be read from the device.
    """
    ring.drop_failed()
    ring.look()
    if ring.bad and not (ring.is_told or knows_scalers()):
        number, details = min(ring.bad.items())
        text = (
            f"{ring.call_names[number]}: non-finite gradients on rank {ring.rank}, found after its last call:\n"
            f"  {describe_rank(details)}"
        )
        warn(ring.rank, text)
