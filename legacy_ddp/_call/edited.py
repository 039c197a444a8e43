"""Detection of gradients that were unscaled or clipped between backward and the call.

An edit alone is no evidence, because a constant factor before the call is a common way to average. Evidence is a
GradScaler that has unscaled the gradients, or edited gradients that have another direction in each call, but the same
norm or the same greatest element. If backward wrote the gradients last, the check costs a look at one gradient and at
the headers. Of edited gradients it reads a sample, and reads all of them only after evidence in the sample.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from legacy_ddp._call.check import Check, LocalStep, Subject
from legacy_ddp._call.pack import Packed, norm_of, pieces_of
from legacy_ddp._errors import EditedGradientError
from legacy_ddp._memory.plan import Plan
from legacy_ddp._ranks.agree import Agreement
from legacy_ddp._ranks.header import Flag
from legacy_ddp._statistics import RECENT_NORMS, LimitDetector, comparable_norm
from legacy_ddp._steps.step_counter import last_scalers, unscaled_ids
from legacy_ddp._text import name_ranks, wrap

_SAMPLE = 2**16  # elements that are searched for the greatest
_EQUAL_GREATEST = 3  # calls with the same greatest element, among the last _GREATEST_CALLS with edited gradients
_GREATEST_CALLS = 16
_DIRECTION = 2**12  # elements that stand for the direction
_SAME_DIRECTION = 0.999  # cosine from which on two directions are the same
_NEAR = 1 - 2**-6  # an element of at least this part of the limit is near it: a few steps of bf16
_FINDINGS = {
    Flag.UNSCALED: "unscaled by a GradScaler",
    Flag.NORM_CLIPPED: "clipped by norm: the same norm in call after call",
    Flag.VALUE_CLIPPED: "clipped by value: the same greatest element in call after call",
}
_ANY = sum(_FINDINGS)
_ADVICE = (
    "clip and unscale after all_reduce(): before the call, a rank limits its own gradient and not the mean, and sees "
    "no infinity of another rank; see "
)


class EditedValues:
    """The directions, norms and greatest elements of the last edited gradients of a rank.

    Only gradients with a new direction count. Norms and greatest elements also repeat if training repeats its data
    while the parameters hardly change, or if every element is a sign.
    """

    def __init__(self) -> None:
        self._directions: deque[torch.Tensor] = deque(maxlen=RECENT_NORMS)
        self._norms = LimitDetector()
        self._greatest: deque[float] = deque(maxlen=_GREATEST_CALLS)

    def limits(self, plan: Plan, packed: Packed, norm: float) -> int:
        """The flags of the limits to which the gradients are probably clipped. ``norm``: of all gradients together."""
        pieces = pieces_of(plan, packed)
        if not self._have_new_direction(pieces):
            return 0
        return (Flag.NORM_CLIPPED if self._norms.add(norm) else 0) | (
            Flag.VALUE_CLIPPED if self._have_limit(plan, packed, pieces) else 0
        )

    def _have_new_direction(self, pieces: Sequence[torch.Tensor]) -> bool:
        """Whether the direction differs from those of the last calls, and not all elements have one magnitude."""
        values = [piece.to("cpu", torch.float32) for piece in _thin_out(pieces, _DIRECTION)]
        sample = torch.cat(values) if values else torch.zeros(0, device="cpu")
        sizes = sample[sample != 0].abs()
        if not sizes.numel() or bool(sizes.min() == sizes.max()):
            return False
        direction = sample / torch.linalg.vector_norm(sample)
        is_new = all(
            abs(float(earlier @ direction)) < _SAME_DIRECTION
            for earlier in self._directions
            if earlier.numel() == direction.numel()
        )
        self._directions.append(direction)
        return is_new

    def _have_limit(self, plan: Plan, packed: Packed, pieces: Sequence[torch.Tensor]) -> bool:
        greatest = max(map(_greatest, _thin_out(pieces, _SAMPLE)), default=0.0)
        self._greatest.append(greatest)
        if not greatest or self._greatest.count(greatest) < _EQUAL_GREATEST:
            return False
        self._greatest.clear()  # if no limit is found below, the next search comes after as many calls
        return _is_limit(plan, packed, greatest)


def _thin_out(pieces: Sequence[torch.Tensor], count: int) -> Iterator[torch.Tensor]:
    """About ``count`` elements of all pieces, at most twice as many; complex elements as pairs."""
    # An odd step, so that the sample is not a single column of a matrix.
    step = sum(piece.numel() for piece in pieces) // count | 1
    for piece in pieces:
        if piece.numel():
            yield (torch.view_as_real(piece) if piece.is_complex() else piece).flatten()[::step]


def _greatest(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, math.inf))


def _is_limit(plan: Plan, packed: Packed, limit: float) -> bool:
    """Whether in several matrices more elements are at ``limit`` than just below it, and none are above.

    In a dtype with few bits the greatest element may repeat by chance, but then few elements have it. Gradients of
    biases do not count: with an absolute loss they are sums of signs, and equal.
    """
    piles = 0
    for _, grad in packed.grads(plan):
        if grad is None or not grad.numel():
            continue
        values = grad.values() if grad.is_sparse else grad
        sizes = (torch.view_as_real(values) if values.is_complex() else values).abs()
        if bool((sizes > limit).any()):
            return False
        at_limit = int((sizes == limit).sum())
        piles += grad.dim() > 1 and at_limit > 1 and at_limit > int((sizes >= _NEAR * limit).sum()) - at_limit
    return piles > 1


class EditedGradients(Check):
    """Warns once, or raises, if gradients were unscaled or clipped before the call."""

    section = "Gradients were changed before the call"
    awaits = _ANY

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.edited_policy != "allow"
        self._raises = subject.settings.checks.edited_policy == "raise"
        self._values = EditedValues()

    def facts(self, step: LocalStep) -> None:
        header, counter, plan = step.header, step.counter, step.plan
        if not header.micro_batches:  # the rank takes no part, or backward has reached nothing
            return
        if last_scalers:
            unscaled = unscaled_ids()
            if unscaled and any(id(each) in unscaled for _, each in counter.reached(plan.parameters)):
                header.flags |= Flag.UNSCALED
        if not step.packed.was_edited:
            return
        norm, finite = header.local_norm, header.finite
        if norm is None and self._raises:  # on a device, where a warning alone is worth no wait
            norm, finite = norm_of(pieces_of(plan, step.packed))
        if norm := comparable_norm(norm, finite):
            limits = self._values.limits(plan, step.packed, norm)
            header.flags |= limits if limits and counter.were_all_edited(plan.parameters) else 0

    def compare(self, step: LocalStep, agreement: Agreement) -> str | None:
        """Local: a warning for the first evidence in a header, or an EditedGradientError with ``edited="raise"``."""
        call = step.call
        told = [(ranks, text) for flag, text in _FINDINGS.items() if (ranks := agreement.ranks_with(flag))]
        self._values = EditedValues()  # so that a loop that goes on after an error collects new evidence
        names = [slot.name for slot in step.plan.layout.slots]
        lines = [f"{call}: gradients changed between backward and the call:"]
        lines += [line for ranks, text in told for line in wrap(f"{name_ranks(ranks)}: {text}", "  ")]
        lines += wrap(f"in a model with {len(names)} parameters, {names[0]!r} among them", "  ")
        lines += wrap(f"{_ADVICE}{call.settings.how_to_check('edited=...')}")
        if self._raises:
            ranks = sorted({rank for ranks, _ in told for rank in ranks})
            raise EditedGradientError("\n".join(lines), ranks=ranks, call=call.number, phase="agree")
        self.is_on = False
        return "\n".join([*lines, "  (warned once)"])
