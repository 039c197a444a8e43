"""Detection of gradients that were unscaled or clipped between backward and the call.

A constant factor before the call is a way to average, and silent: an edit alone is no evidence. The evidence is a
GradScaler that has unscaled, or edited gradients of new directions with the same norm, or the same greatest element, in
call after call. While gradients are as backward left them, the cost is a look at a single gradient and at the headers.
Of edited gradients a sample is read; all gradients only after evidence in the sample.
"""

from legacy_ddp._agreement.agree import Agreement
from legacy_ddp._agreement.header import Flag, Header
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._checks import Checks
from legacy_ddp._collectives.edited_values import EditedValues
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._collectives.warn_once import Warnings
from legacy_ddp._compare import name_ranks
from legacy_ddp._errors import EditedGradientError
from legacy_ddp._statistics import comparable_norm
from legacy_ddp._step_guard.backward_counter import BackwardCounter
from legacy_ddp._step_guard.unscaled import unscaled_ids, watch_scalers
from legacy_ddp._text import wrap
from legacy_ddp._transport.call import Call

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


class EditedGradients:
    """The evidence about a set of parameters. ``is_open``: False if nothing is looked for, or after the warning."""

    def __init__(self, checks: Checks) -> None:
        self.is_open = checks.edited_policy != "allow"
        self._raises = checks.edited_policy == "raise"
        self._values = EditedValues()
        if self.is_open:
            watch_scalers()

    def add_flags(self, header: Header, counter: BackwardCounter, plan: Plan, packed: Packed) -> None:
        """Write the facts of this rank to the header."""
        if not (self.is_open and header.takes_part):
            return
        if (unscaled := unscaled_ids()) and any(id(each) in unscaled for _, each in counter.reached(plan.parameters)):
            header.flags |= Flag.UNSCALED
        norm = comparable_norm(header.local_norm, header.finite)
        if norm and counter.was_first_edited(plan.parameters):
            limits = self._values.limits(plan, packed, norm)
            header.flags |= limits if limits and counter.were_all_edited(plan.parameters) else 0

    def check(self, call: Call, plan: Plan, agreement: Agreement, warnings: Warnings) -> None:
        """Add a warning on every rank for the first evidence in a header. Not collective.

        Raises:
            EditedGradientError: the same with ``edited="raise"``. Raised on every rank, before any gradient moves.
        """
        if not self.is_open or not agreement.some_flags & _ANY:
            return
        told = [(ranks, text) for flag, text in _FINDINGS.items() if (ranks := agreement.ranks_with(flag))]
        self._values = EditedValues()  # a loop that goes on after an error begins anew
        names = [slot.name for slot in plan.layout.slots]
        lines = [f"{call}: gradients changed between backward and the call:"]
        lines += [line for ranks, text in told for line in wrap(f"{name_ranks(ranks)}: {text}", "  ")]
        lines += wrap(f"in a model with {len(names)} parameters, {names[0]!r} among them", "  ")
        lines += wrap(_ADVICE)
        if self._raises:
            ranks = sorted({rank for ranks, _ in told for rank in ranks})
            raise EditedGradientError("\n".join(lines), ranks=ranks, call=call.number, phase="agree")
        warnings.add_everywhere(call, "\n".join([*lines, "  (warned once)"]))
        self.is_open = False
