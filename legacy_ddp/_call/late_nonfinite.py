"""Non-finite gradients on a device, found without a wait of the host and told some calls later.

``Checks(nonfinite="warn")`` must not stop the host for a device. In every call the device finds out which gradients
have NaN or infinity, and copies the answer to the host (``late_rows``). The header of a call carries the number of the
newest complete row of a rank, and a bit for each of its last rows: whether it has a non-finite gradient. All ranks
judge the rows up to the lowest of these numbers.

Rows that no later call has judged are judged in check_replicas() and broadcast_parameters(), with a wait, or told by
each rank as its process ends.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._call.check import Check, LocalStep, Part, Ring, Row, Subject
from legacy_ddp._call.nonfinite import (
    MAX_NAMES,
    NonFinite,
    NonFiniteGradients,
    inspect,
    may_overflow,
)
from legacy_ddp._explainer import explainer
from legacy_ddp._log import warn
from legacy_ddp._memory.flat_buffer import DENSE
from legacy_ddp._ranks.agree import Agreement
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.header import Flag
from legacy_ddp._ranks.private_groups import Groups
from legacy_ddp._steps.step_counter import knows_scalers
from legacy_ddp._text import error_line

_WINDOW = 16  # bits in the header: more than rows can be on the way on one rank and judged on another


@dataclass(frozen=True)
class _Searched:
    """The gradients of a row: the name of their call, and the names of the gradients of each part.

    An integer of a part is 1 for a non-finite gradient.
    """

    call_name: str
    names: Sequence[Sequence[str]]


class _Ring(Ring[_Searched]):
    """The answers about the gradients of calls on a process group.

    ``judged``: the newest judged row. ``has_scaler``: a scaler was passed to the checks. ``bad``: the details of
    complete rows with a non-finite gradient that are not judged. ``is_told``: a warning was given, and no later call
    was finite on all ranks. ``judged`` and ``is_told`` are equal on all ranks.
    """

    def __init__(self, rank: int, *, has_scaler: bool) -> None:
        super().__init__()
        self.rank = rank
        self.has_scaler = has_scaler
        self.judged = 0
        self.is_told = False
        self.bad: dict[int, NonFinite] = {}
        self.call_names: dict[int, str] = {}  # of the calls that are not judged

    def take(self, row: Row[_Searched]) -> None:
        bad = [
            name
            for names, part in zip(row.subject.names, row.parts, strict=True)
            for name, is_bad in zip(names, part.integers.tolist(), strict=True)
            if is_bad
        ]
        if bad and row.number > self.judged:
            present = sum(map(len, row.subject.names))
            self.bad[row.number] = NonFinite(dict.fromkeys(bad[:MAX_NAMES], ()), len(bad), present)

    @property
    def word(self) -> int:
        """What the header of this rank carries: ``ready``, and the bit of each of the last rows."""
        bits = sum(1 << self.ready - number for number in self.bad if self.ready - number < _WINDOW)
        return self.ready << _WINDOW | bits


class LateNonFiniteGradients(Check):
    """Warns of non-finite gradients on a device, some calls later. Not collective while all gradients are finite. Not
    asked in a call whose parameters are all on the CPU."""

    section = NonFiniteGradients.section

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.nonfinite_policy == "warn"
        self._rings: weakref.WeakKeyDictionary[Groups, _Ring] = weakref.WeakKeyDictionary()
        self._has_searched_scalers = False
        self._is_unable = False

    def facts(self, step: LocalStep) -> None:
        call, header = step.call, step.header
        ring = self._rings.get(call.groups)
        if ring is None:
            ring = _Ring(call.groups.rank, has_scaler=call.checks.grad_scaler is not None)
            weakref.finalize(call.groups, _tell_rest, ring)  # also as the process ends
            self._rings[call.groups] = ring
        ring.drop_failed()
        ring.look()
        parts = self._begin(step, ring) if header.takes_part and not self._is_unable else {}
        ring.add(_Searched(str(call), [*parts]), [*parts.values()])
        header.gradients = ring.word

    def compare(self, step: LocalStep, agreement: Agreement) -> str | None:
        """Collective only if a header shows a non-finite gradient and no earlier call of the same streak has warned."""
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

    def _begin(self, step: LocalStep, ring: _Ring) -> dict[tuple[str, ...], Part]:
        """Let the devices find the non-finite gradients, and copy the answers to the host. The host does not wait."""
        try:
            return _begin_parts(step, ring)
        except (RuntimeError, TypeError) as error:  # a backend without one of the operations
            self._is_unable = True
            advice = step.call.settings.how_to_check('nonfinite="raise"')
            text = (
                f"{step.call}: gradients on this device cannot be searched for NaN and infinity ({error_line(error)}); "
                f"not tried again; see {advice}"
            )
            warn(step.call.groups.rank, text, self.section)
            return {}

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
        return explainer().nonfinite(name, ranks, found, call.settings, reaction="warn", found_in=str(call))


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
    views = chain.from_iterable(buffer.views.made.tensors for buffer in plan.buffers)
    for slot, kind, view in zip(plan.layout.slots, packed.kinds, views, strict=True):
        if kind == DENSE:
            yield slot.name, view


def _begin_parts(step: LocalStep, ring: _Ring) -> dict[tuple[str, ...], Part]:
    """A part for the gradients of each device and dtype, by their names."""
    alike: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    for name, values in _gradients(step):
        if values.numel():
            real = torch.view_as_real(values) if values.is_complex() else values
            alike.setdefault((real.device, real.dtype), {})[name] = real
    parts = {}
    for grads in alike.values():
        # The greatest magnitude: unlike a sum of squares, it is finite if and only if all elements are.
        greatest = torch.stack(internals.foreach_norm(list(grads.values()), float("inf")))
        parts[tuple(grads)] = ring.begin_part(torch.isfinite(greatest).logical_not().to(torch.int32))
    return parts


def _tell_rest(ring: _Ring) -> None:
    """Tell the first complete row of this rank that no call has judged. A device is not asked: it may be lost.

    Not beside a GradScaler, which may have skipped the step: its scale would have to be read from the device.
    """
    ring.drop_failed()
    ring.look()
    if ring.bad and not (ring.is_told or ring.has_scaler or knows_scalers()):
        number, details = min(ring.bad.items())
        text = (
            f"{ring.call_names[number]}: non-finite gradients on rank {ring.rank}, found after its last call:\n"
            f"  {explainer().nonfinite_of_rank(details)}"
        )
        warn(ring.rank, text, NonFiniteGradients.section)
