"""Gradients with NaN or infinity: found before any gradient is exchanged, or on a device some calls later.

While every gradient is finite, the check costs a look at the headers. Otherwise the ranks exchange details, a few
hundred bytes per rank. ``Checks(nonfinite="ignore")`` turns the check off.

With ``Checks(nonfinite="warn")`` the host must not wait for a device. In every call the device finds out which
gradients have NaN or infinity, and copies the answer to the host (:class:`Ring`). The header of a call carries the
number of the newest complete row of a rank, and a bit for each of its last rows: whether it has a non-finite gradient.
All ranks judge the rows up to the lowest of these numbers. Rows that no later call has judged are judged in
check_replicas() and broadcast_parameters(), where the host waits. At the end of a process, its rank reports the rest.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._call.check import ALWAYS, Check, LocalStep, Part, Ring, Row, Subject
from legacy_ddp._call.pack import Packed
from legacy_ddp._check_settings import LossScaler
from legacy_ddp._errors import NonFiniteGradientError
from legacy_ddp._explainer import explainer
from legacy_ddp._log import warn
from legacy_ddp._memory.flat_buffer import DENSE
from legacy_ddp._memory.plan import Plan
from legacy_ddp._ranks.agree import Agreement
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.header import Flag
from legacy_ddp._ranks.private_groups import Groups
from legacy_ddp._steps.step_counter import knows_scalers, used_scaler, watch_steps
from legacy_ddp._text import error_line, name_ranks
from legacy_ddp._torch import device as devices

MAX_NAMES = 5


@dataclass(frozen=True)
class NonFinite:
    """Details of a rank, with the names of at most ``MAX_NAMES`` gradients and weights."""

    counts: Mapping[str, Sequence[int]]  # (NaN, inf, elements) of non-finite gradients; () where not counted
    bad_grads: int = 0  # number of all non-finite gradients
    present: int = 0  # number of gradients with elements
    weights: Sequence[str] = ()  # names of non-finite parameters
    bad_weights: int = 0  # number of all non-finite parameters
    scale: float | None = None  # of an enabled GradScaler
    failure: str = ""  # error of the inspection
    has_other_scaler: bool = False  # a GradScaler that was not passed has scaled a loss; not searched for by a warning


class NonFiniteGradients(Check):
    """Raises, warns, or lets all ranks skip the step, if a participating rank has a non-finite gradient."""

    section = "Gradients are not finite"
    awaits = Flag.NONFINITE

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.nonfinite_policy != "ignore"
        # The groups on which a warning was given, and no later call was finite. Equal on all ranks.
        self._warned: weakref.WeakSet[Groups] = weakref.WeakSet()
        self._skipped_calls = 0  # with "skip"; equal on all ranks
        self._has_searched_scalers = False  # the scalers of the process are searched for once
        if self.is_on:
            watch_steps()

    def facts(self, step: LocalStep) -> None:
        checks, header = step.call.checks, step.header
        header.flags |= Flag.WATCHED
        if checks.nonfinite_policy == "skip" and checks.grad_scaler is not None and checks.grad_scaler.is_enabled():
            header.flags |= Flag.SCALED

    def compare(self, step: LocalStep, agreement: Agreement) -> str | None:
        """Collective only if a header shows a non-finite gradient, and no warning was given since the last finite call.

        Raises:
            NonFiniteGradientError: with ``nonfinite="raise"``, unless GradScalers explain the gradient on all ranks;
                with ``"skip"``, if only some ranks have a GradScaler.
        """
        call = step.call
        if not agreement.common_flags & Flag.WATCHED or not agreement.participants:
            return None
        if not agreement.some_flags & Flag.NONFINITE:
            self._warned.discard(call.groups)
            self.awaits = ALWAYS if self._warned else Flag.NONFINITE
            return None
        ranks = agreement.ranks_with(Flag.NONFINITE)
        reaction = call.checks.nonfinite_policy
        if reaction == "skip" and _have_scalers(call, agreement, ranks):
            reaction = "warn"
        if reaction == "skip":
            agreement.leave_out_all()
            self._skipped_calls += 1
        is_told_again = reaction == "skip" and str(self._skipped_calls).strip("0") == "1"  # 1, 10, 100, ...
        if call.groups in self._warned and not is_told_again:
            return None
        with call.phase("agree"):
            search = not self._has_searched_scalers
            is_affected = call.groups.rank in ranks
            own = inspect(call, lambda: _scan(step.plan, step.packed) if is_affected else NonFinite({}), search=search)
            self._has_searched_scalers = True
            found = [NonFinite(**of_rank) for of_rank in call.gather_objects(asdict(own))]
        if reaction != "skip" and all(may_overflow(details.scale) for details in found):
            return None
        text = explainer().nonfinite(
            str(call), ranks, found, call.settings, reaction=reaction, skipped_calls=self._skipped_calls
        )
        if reaction == "raise":
            names = [name for rank in ranks for name in found[rank].counts]
            parameter = names[0] if names else None
            raise NonFiniteGradientError(text, ranks=ranks, call=call.number, phase="agree", parameter=parameter)
        self._warned.add(call.groups)
        self.awaits = ALWAYS  # to see the next finite call
        return text


def _have_scalers(call: Call, agreement: Agreement, ranks: Sequence[int]) -> bool:
    """Whether GradScalers skip the step on all ranks. NonFiniteGradientError: only some ranks have an enabled one."""
    # The infinity stays in the mean: there it makes every GradScaler skip the step.
    if agreement.common_flags & Flag.SCALED or not agreement.some_flags & Flag.SCALED:
        return bool(agreement.common_flags & Flag.SCALED)
    without = sorted(set(range(agreement.headers.size)) - set(agreement.ranks_with(Flag.SCALED)))
    text = (
        f"{call}: {name_ranks(ranks)}: non-finite gradients, and {name_ranks(without)} without an enabled GradScaler:\n"
        "other ranks would leave the step to their GradScaler; pass it as Checks(grad_scaler=...) on all ranks, or on "
        "none"
    )
    raise NonFiniteGradientError(text, ranks=without, call=call.number, phase="agree")


def may_overflow(scale: float | None) -> bool:
    """Whether the scale of a GradScaler may have caused the infinity.

    A scale of at most 1 causes no overflow. With an infinite scale every gradient is non-finite, whatever steps are
    skipped.
    """
    return scale is not None and 1 < scale < math.inf


def inspect(call: Call, find: Callable[[], NonFinite], *, search: bool) -> NonFinite:
    """What ``find`` finds on this rank, with the GradScaler in use, also if it was not passed to ``Checks``.

    A scaler may skip the step. A warning takes this into account, and an error names ``Checks(grad_scaler=)``.
    """
    try:
        found = find()
        passed = call.checks.grad_scaler
        if passed is not None:
            return replace(found, scale=_scale_of(passed))
        used = used_scaler(search=search)
        if call.checks.nonfinite_policy in ("raise", "skip"):
            return replace(found, has_other_scaler=used is not None)
        return replace(found, scale=_scale_of(used))
    except Exception as error:  # noqa: BLE001 - the other ranks wait for the details of this rank, whatever fails here
        return NonFinite({}, failure=error_line(error))


def _scale_of(scaler: LossScaler | None) -> float | None:
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None


def _scan(plan: Plan, packed: Packed) -> NonFinite:
    """The non-finite gradients and parameters. The host waits once for a device."""
    grads: dict[str, torch.Tensor] = {}
    for name, grad in packed.grads(plan):
        values = grad.values() if grad is not None and grad.is_sparse else grad
        if values is not None and values.numel():
            grads[name] = values
    counts = [count for values in grads.values() for count in _counts(values)]
    are_finite = [torch.isfinite(parameter).all() for parameter in plan.parameters]
    read = list(map(int, devices.read_scalars([*counts, *are_finite])))
    of_grads, of_weights = read[: len(counts)], read[len(counts) :]
    bad_grads = {
        name: (nan, nonfinite - nan, values.numel())
        for (name, values), nonfinite, nan in zip(grads.items(), of_grads[::2], of_grads[1::2], strict=True)
        if nonfinite
    }
    weights = [slot.name for slot, is_finite in zip(plan.layout.slots, of_weights, strict=True) if not is_finite]
    named = dict(list(bad_grads.items())[:MAX_NAMES])
    return NonFinite(named, len(bad_grads), len(grads), weights[:MAX_NAMES], len(weights))


def _counts(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of elements that are not finite, and of NaN. A complex element with a NaN part counts as NaN."""
    return torch.isfinite(values).logical_not_().sum(), torch.isnan(values).sum()


_WINDOW = 16  # bits in the header: more than rows can be on the way on one rank and judged on another


@dataclass(frozen=True)
class _Searched:
    """The gradients of a row. An integer of a part is 1 for a non-finite gradient."""

    call_name: str
    names: Sequence[Sequence[str]]  # of the gradients of each part


class _Ring(Ring[_Searched]):
    """The answers about the gradients of calls on a process group. ``has_scaler``: one was passed to the checks."""

    def __init__(self, rank: int, *, has_scaler: bool) -> None:
        super().__init__()
        self.rank = rank
        self.has_scaler = has_scaler
        self.judged = 0  # the newest judged row; equal on all ranks
        self.is_told = False  # a warning was given, and no later call was finite on all ranks; equal on all ranks
        self.bad: dict[int, NonFinite] = {}  # of complete rows with a non-finite gradient that are not judged
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
    """Warns of non-finite gradients on a device, some calls later. Not called if all parameters are on the CPU."""

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
        """Collective only if a row has a non-finite gradient, and no warning was given since the last finite row."""
        call, ring = step.call, self._rings[step.call.groups]
        ring.agreed += 1
        ring.call_names[ring.agreed] = str(call)
        is_common = bool(agreement.common_flags & Flag.WATCHED)
        return self._judge(call, ring, agreement.column("gradients") if is_common else [])

    def flush_flag(self, groups: Groups) -> int:
        """The flag for the header of an operation that may flush: this rank has rows that are not judged."""
        ring = self._rings.get(groups)
        return Flag.WATCHED if ring is not None and ring.judged < ring.agreed else 0

    def flush(self, call: Call) -> str | None:
        """Collective: wait for all rows, and judge them. All ranks must have the flag. The text of a warning."""
        ring = self._rings[call.groups]
        ring.drop_failed()
        ring.wait()
        words = call.gather(torch.tensor([ring.word], device="cpu")).flatten().tolist()
        return self._judge(call, ring, words)

    def _begin(self, step: LocalStep, ring: _Ring) -> dict[tuple[str, ...], Part]:
        """Start the search for non-finite gradients on the devices. The host does not wait."""
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

        The scales are read now: they may have been greater in that call.
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
    """The elements of every gradient."""
    plan, packed = step.plan, step.packed
    if packed.sparse or any(flat is not buffer.flat for buffer, flat in zip(plan.buffers, packed.flats, strict=True)):
        for name, grad in packed.grads(plan):
            if grad is not None:
                yield name, grad.values() if grad.is_sparse else grad
        return
    # The views of the slots exist already: new views would cost the host much time.
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
        # The greatest magnitude, because a sum of squares may be infinite although all elements are finite.
        greatest = torch.stack(internals.foreach_norm(list(grads.values()), float("inf")))
        parts[tuple(grads)] = ring.begin_part(torch.isfinite(greatest).logical_not().to(torch.int32))
    return parts


def _tell_rest(ring: _Ring) -> None:
    """Warn of the first complete row of this rank that no call has judged. Does not ask the device, which may be lost.

    Without a warning if there is a GradScaler: it may have skipped the step, and its scale is on the device.
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
