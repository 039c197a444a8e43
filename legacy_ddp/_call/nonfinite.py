"""Detection and report of gradients with NaN or infinity, before any gradient is exchanged.

Runs unless ``Checks(nonfinite="ignore")``. While every gradient is finite, the cost is a look at the headers. Otherwise
the ranks exchange details, a few hundred bytes per rank.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from legacy_ddp._call.check import Check, LocalStep, Subject
from legacy_ddp._call.pack import Packed
from legacy_ddp._check_settings import LossScaler, Nonfinite
from legacy_ddp._errors import NonFiniteGradientError
from legacy_ddp._memory.plan import Plan
from legacy_ddp._ranks.agree import Agreement
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.header import Flag
from legacy_ddp._ranks.private_groups import Groups
from legacy_ddp._settings import Settings
from legacy_ddp._steps.step_counter import used_scaler, watch_scalers
from legacy_ddp._text import MAX_LINES, TIE, error_line, name_ranks, wrap
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
        text = describe_nonfinite(
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


def describe_nonfinite(
    call_name: str,
    ranks: Sequence[int],
    found: Sequence[NonFinite],
    settings: Settings,
    *,
    reaction: Nonfinite,
    skipped_calls: int = 0,
    found_in: str = "",
) -> str:
    """The text of the error or warning, equal on every rank. ``found``: of all ranks; ``ranks``: with non-finite
    gradients. ``skipped_calls``: with the reaction ``"skip"``, this call included. ``found_in``: a later call, which
    found the gradients after they were exchanged."""
    by_text: dict[str, list[int]] = {}
    for rank, details in enumerate(found):
        if rank in ranks or details.failure:
            by_text.setdefault(describe_rank(details), []).append(rank)
    lines = [f"{name_ranks(same)}: {text}" for text, same in list(by_text.items())[:MAX_LINES]]
    if len(by_text) > MAX_LINES:
        lines.append(f"... {sum(map(len, list(by_text.values())[MAX_LINES:]))} more ranks, each with different details")
    affected = [found[rank] for rank in ranks]
    steps = _next_steps(affected, found, settings, reaction, skipped_calls, is_late=bool(found_in))
    wrapped = [line for text in lines for line in wrap(text, "  ", break_words=False, ties=True)]
    wrapped += [line for text in steps for line in wrap(text, break_words=False)]
    where = f"in {found_in}, when the device had told them" if found_in else "before they were exchanged"
    return "\n".join([f"{call_name}: non-finite gradients, found {where}:", *wrapped])


def _next_steps(
    affected: Sequence[NonFinite],
    found: Sequence[NonFinite],
    settings: Settings,
    reaction: Nonfinite,
    skipped_calls: int,
    *,
    is_late: bool,
) -> Iterator[str]:
    scales = [details.scale for details in found if details.scale is not None]
    without = [rank for rank, details in enumerate(found) if details.scale is None and not details.failure]
    if len(scales) == len(found):
        scale = next(scale for scale in scales if not may_overflow(scale))
        yield f"the GradScaler's scale is {scale:g}: to skip this step would not help"
    elif scales and without:
        yield f"no GradScaler is enabled on {name_ranks(without)}: not all ranks would skip this step"
    if any(details.bad_weights for details in affected):
        yield "go back to finite parameters, and look at the step that broke them"
    elif reaction == "raise":
        yield "nothing changed: mend the cause, or zero_grad() on all ranks drops this step"
    if reaction == "skip":
        yield (
            f"all ranks skip this step ({skipped_calls} until now): every .grad is None, and record.skipped is True "
            "(told again after 10, 100, ... skipped steps, and after finite gradients)"
        )
    if reaction == "warn":
        received, stop = ("has got them", "in time") if is_late else ("gets them now", "here instead")
        yield (
            f"every rank {received} (warned once until all are finite again); see "
            f"{settings.how_to_check('nonfinite=...')} to stop {stop}"
        )
    takes_scaler = not settings.by_environment
    pass_it = "pass it as Checks(grad_scaler=...) on all ranks, or " if takes_scaler else ""
    users = [rank for rank, details in enumerate(found) if details.has_other_scaler]
    if users and reaction == "skip":
        yield (
            f"a GradScaler of {name_ranks(users)} was not passed, and its step() fails without gradients: {pass_it}"
            "step only if record.skipped is False"
        )
    elif users and takes_scaler:
        yield (
            f"a GradScaler of {name_ranks(users)} was not passed: pass the scaler as Checks(grad_scaler=...) on all "
            "ranks, and a step that the scaler skips is no error"
        )
    if reaction == "warn" and not scales and takes_scaler:
        yield "if a loss scaler of your own skips such steps, pass the scaler as Checks(grad_scaler=...)"


def may_overflow(scale: float | None) -> bool:
    """Whether the scale of a GradScaler may have caused the infinity.

    A scale of at most 1 causes no overflow. An infinite scale makes every gradient non-finite, and the scaler cannot
    mend that by skipping steps.
    """
    return scale is not None and 1 < scale < math.inf


def describe_rank(details: NonFinite) -> str:
    if details.failure:
        return f"inspection failed: {details.failure}"
    if details.bad_grads == details.present > 1:
        hint = "" if details.bad_weights else ": look at its loss and its input"
        parts = [f"every gradient ({details.bad_grads} of {details.present} parameters){hint}"]
    else:
        parts = [
            f"{name!r}: {_format_counts(*counts)}" if counts else repr(name) for name, counts in details.counts.items()
        ]
        parts += _more(details.bad_grads - len(details.counts))
    if details.bad_weights:
        names = [*map(repr, details.weights), *_more(details.bad_weights - len(details.weights))]
        parts.append(f"parameters that were not finite before this backward: {', '.join(names)}")
    return "; ".join(parts)


def _more(count: int) -> list[str]:
    return [f"... {count} more"] if count else []


def _format_counts(nan: int, inf: int, numel: int) -> str:
    counts = [f"{count} {value}" for count, value in ((nan, "NaN"), (inf, "inf")) if count]
    return f"{' and '.join(counts)} of {numel}".replace(" ", TIE)


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
