"""Detection and report of gradients with NaN or infinity, before any gradient is exchanged.

Runs unless ``Checks(nonfinite="ignore")``. While every gradient is finite, the cost is a look at the headers. Otherwise
the ranks exchange details, a few hundred bytes per rank.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from legacy_ddp._call.check import Check, LocalStep, Subject
from legacy_ddp._call.pack import Packed
from legacy_ddp._check_settings import LossScaler
from legacy_ddp._errors import NonFiniteGradientError
from legacy_ddp._explainer import explainer
from legacy_ddp._memory.plan import Plan
from legacy_ddp._ranks.agree import Agreement
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.header import Flag
from legacy_ddp._ranks.private_groups import Groups
from legacy_ddp._steps.step_counter import used_scaler, watch_scalers
from legacy_ddp._text import error_line, name_ranks
from legacy_ddp._torch import device as devices

MAX_NAMES = 5


@dataclass(frozen=True)
class NonFinite:
    """Details of a rank, with the names of at most ``MAX_NAMES`` gradients and weights.

    ``counts``: (NaN, inf, elements) of non-finite gradients, by parameter; empty if not counted. ``bad_grads``: number
    of all non-finite gradients. ``present``: number of gradients with elements. ``weights``: names of non-finite
    parameters. ``bad_weights``: number of all non-finite parameters. ``scale``: scale of an enabled GradScaler.
    ``failure``: error of the inspection. ``has_other_scaler``: a GradScaler that was not passed has scaled a loss; only
    looked for if the reaction is not a warning.
    """

    counts: Mapping[str, Sequence[int]]
    bad_grads: int = 0
    present: int = 0
    weights: Sequence[str] = ()
    bad_weights: int = 0
    scale: float | None = None
    failure: str = ""
    has_other_scaler: bool = False


class NonFiniteGradients(Check):
    """Raises, warns, or lets all ranks skip the step, if a participating rank has a non-finite gradient."""

    section = "Gradients are not finite"

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.nonfinite_policy != "ignore"
        # The groups with a streak of non-finite gradients, after the warning. Equal on all ranks. Looked up in every
        # call: a WeakSet would take longer.
        self._warned: set[weakref.ref[Groups]] = set()
        self._skipped_calls = 0  # with "skip"; equal on all ranks
        self._has_searched_scalers = False  # all scalers of the process were looked for, which is done once
        if self.is_on:
            watch_scalers()

    def facts(self, step: LocalStep) -> None:
        """Whether this rank takes part in the report, which needs all ranks."""
        checks, header = step.call.checks, step.header
        header.flags |= Flag.WATCHED
        if checks.nonfinite_policy == "skip" and checks.grad_scaler is not None and checks.grad_scaler.is_enabled():
            header.flags |= Flag.SCALED

    def compare(self, step: LocalStep, agreement: Agreement) -> str | None:
        """Collective only if a header shows a non-finite gradient and no earlier call of the same streak has warned.

        Raises:
            NonFiniteGradientError: with ``nonfinite="raise"``, unless GradScalers explain the gradient on all ranks;
                with ``"skip"``, if only some ranks have a GradScaler.
        """
        call = step.call
        if not agreement.common_flags & Flag.WATCHED or not agreement.participants:
            return None
        if not agreement.some_flags & Flag.NONFINITE:
            self._warned.discard(weakref.ref(call.groups))
            return None
        ranks = agreement.ranks_with(Flag.NONFINITE)
        reaction = call.checks.nonfinite_policy
        if reaction == "skip" and _have_scalers(call, agreement, ranks):
            reaction = "warn"
        if reaction == "skip":
            agreement.leave_out_all()
            self._skipped_calls += 1
        is_told_again = reaction == "skip" and str(self._skipped_calls).strip("0") == "1"  # 1, 10, 100, ...
        if weakref.ref(call.groups) in self._warned and not is_told_again:
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
        self._warned.add(weakref.ref(call.groups))
        return text


def _have_scalers(call: Call, agreement: Agreement, ranks: Sequence[int]) -> bool:
    """Whether GradScalers skip the step: they need the infinity in the mean, which makes all of them skip.

    Raises:
        NonFiniteGradientError: only some ranks have an enabled GradScaler: no step would be skipped by all ranks.
    """
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

    A scale of at most 1 causes no overflow. An infinite scale makes every gradient non-finite, and the scaler cannot
    mend that by skipping steps.
    """
    return scale is not None and 1 < scale < math.inf


def inspect(call: Call, find: Callable[[], NonFinite], *, search: bool) -> NonFinite:
    """What ``find`` finds on this rank, with the GradScaler in use, also if the loop did not pass one to ``Checks``.

    A scaler in use may skip the step: a warning takes this into account, and an error names ``Checks(grad_scaler=)``.
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
