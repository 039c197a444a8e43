"""Detection of gradients that were unscaled or clipped between backward and the call.

A constant factor before the call is a way to average, and silent: an edit alone is no evidence. The evidence is a
GradScaler that has unscaled, or edited gradients of new directions with the same norm, or the same greatest element, in
call after call. While gradients are as backward left them, the cost is a look at a single gradient and at the headers.
Of edited gradients a sample is read; all gradients only after evidence in the sample.
"""

from legacy_ddp._agreement.agree import Agreement
from legacy_ddp._agreement.header import Flag
from legacy_ddp._collectives.check import Check, LocalStep, Subject
from legacy_ddp._collectives.edited_values import EditedValues
from legacy_ddp._compare import name_ranks
from legacy_ddp._errors import EditedGradientError
from legacy_ddp._statistics import comparable_norm
from legacy_ddp._step_guard.step_counter import unscaled_ids, watch_scalers
from legacy_ddp._text import wrap

_FINDINGS = {
    Flag.UNSCALED: "unscaled by a GradScaler",
    Flag.NORM_CLIPPED: "clipped by norm: the same norm in call after call",
    Flag.VALUE_CLIPPED: "clipped by value: the same greatest element in call after call",
}
_ANY = sum(_FINDINGS)
_ADVICE = (
    "clip and unscale after all_reduce(): before the call, a rank limits its own gradient and not the mean, and sees "
    "no infinity of another rank; see Checks(edited=...)"
)


class EditedGradients(Check):
    """The evidence about a set of parameters, until the warning."""

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.edited_policy != "allow"
        self._raises = subject.settings.checks.edited_policy == "raise"
        self._values = EditedValues()
        if self.is_on:
            watch_scalers()

    def facts(self, step: LocalStep) -> None:
        header, counter, plan = step.header, step.counter, step.plan
        if not header.takes_part:
            return
        if (unscaled := unscaled_ids()) and any(id(each) in unscaled for _, each in counter.reached(plan.parameters)):
            header.flags |= Flag.UNSCALED
        if not counter.was_first_edited(plan.parameters):
            return
        if norm := comparable_norm(header.local_norm, header.finite):
            limits = self._values.limits(plan, step.packed, norm)
            header.flags |= limits if limits and counter.were_all_edited(plan.parameters) else 0

    def compare(self, step: LocalStep, agreement: Agreement) -> str | None:
        """A warning for the first evidence in a header. Not collective.

        Raises:
            EditedGradientError: the same with ``edited="raise"``.
        """
        if not agreement.some_flags & _ANY:
            return None
        call = step.call
        told = [(ranks, text) for flag, text in _FINDINGS.items() if (ranks := agreement.ranks_with(flag))]
        self._values = EditedValues()  # a loop that goes on after an error begins anew
        names = [slot.name for slot in step.plan.layout.slots]
        lines = [f"{call}: gradients changed between backward and the call:"]
        lines += [line for ranks, text in told for line in wrap(f"{name_ranks(ranks)}: {text}", "  ")]
        lines += wrap(f"in a model with {len(names)} parameters, {names[0]!r} among them", "  ")
        lines += wrap(_ADVICE)
        if self._raises:
            ranks = sorted({rank for ranks, _ in told for rank in ranks})
            raise EditedGradientError("\n".join(lines), ranks=ranks, call=call.number, phase="agree")
        self.is_on = False
        return "\n".join([*lines, "  (warned once)"])
