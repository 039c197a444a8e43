"""Whose gradient is not finite, in which parameter? Asked when the headers have matched, before anything is exchanged.

While all is finite this costs a look at the rows. Otherwise the ranks exchange details, a few hundred bytes each.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from legacy_ddp._agreement.agree import Agreement
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._compare import MAX_LINES, name_ranks
from legacy_ddp._error_text import error_line
from legacy_ddp._errors import NonFiniteGradientError
from legacy_ddp._settings import LossScaler
from legacy_ddp._text import TIE, wrap
from legacy_ddp._transport.call import Call

_MAX_NAMES = 5


@dataclass(frozen=True)
class Damage:
    """What one rank tells of itself; the first few of ``damaged`` gradients and of ``bad_weights`` by name.

    ``counts``: (NaN, inf, elements) by parameter. ``present``: gradients with elements. ``scale``: of an enabled
    GradScaler. ``trouble``: why it could not look.
    """

    counts: Mapping[str, Sequence[int]]
    damaged: int = 0
    present: int = 0
    weights: Sequence[str] = ()
    bad_weights: int = 0
    scale: float | None = None
    trouble: str = ""


def check_finite(call: Call, plan: Plan, packed: Packed, agreement: Agreement) -> str:
    """The warning that every rank owes its user, empty if there is none.

    Collective only if a header shows a non-finite gradient of a rank that takes part, and no earlier call of the same
    streak has warned: what all ranks know alike. Writes nothing.

    Raises:
        NonFiniteGradientError: with ``nonfinite="raise"``, unless GradScalers excuse it on all ranks.
    """
    policy, state = call.checks.nonfinite_policy, call.group_state
    if policy == "ignore" or not agreement.participants:
        return ""
    ranks = [rank for rank in agreement.participants if agreement.rows[rank].finite is False]
    if not ranks or state.nonfinite_warned:
        state.nonfinite_warned = bool(ranks)
        return ""
    with call.phase("agree"):
        own = _look(plan, packed, call.checks.grad_scaler, scan=call.groups.rank in ranks)
        damages = [Damage(**of_rank) for of_rank in call.gather_objects(asdict(own))]
    if all(_may_overflow(damage.scale) for damage in damages):
        return ""
    text = describe_damage(str(call), ranks, damages, stops=policy == "raise")
    if policy == "raise":
        names = [name for rank in ranks for name in damages[rank].counts]
        parameter = names[0] if names else None
        raise NonFiniteGradientError(text, ranks=ranks, call=call.number, phase="agree", parameter=parameter)
    state.nonfinite_warned = True
    return text


def describe_damage(call_name: str, ranks: Sequence[int], damages: Sequence[Damage], *, stops: bool) -> str:
    """The text that is the same on every rank; ``damages`` are all ranks', ``ranks`` those concerned."""
    said: dict[str, list[int]] = {}
    for rank, damage in enumerate(damages):
        if rank in ranks or damage.trouble:
            said.setdefault(_say(damage), []).append(rank)
    lines = [f"{name_ranks(which)}: {words}" for words, which in list(said.items())[:MAX_LINES]]
    if len(said) > MAX_LINES:
        lines.append(f"... {sum(map(len, list(said.values())[MAX_LINES:]))} ranks more, each with others")
    steps = _next_steps([damages[rank] for rank in ranks], damages, stops=stops)
    wrapped = [line for text in lines for line in wrap(text, "  ", break_words=False, ties=True)]
    wrapped += [line for text in steps for line in wrap(text, break_words=False)]
    return "\n".join([f"{call_name}: non-finite gradients, found before they were exchanged:", *wrapped])


def _next_steps(concerned: Sequence[Damage], damages: Sequence[Damage], *, stops: bool) -> Iterator[str]:
    scales = [damage.scale for damage in damages if damage.scale is not None]
    without = [rank for rank, damage in enumerate(damages) if damage.scale is None and not damage.trouble]
    if len(scales) == len(damages):
        scale = next(scale for scale in scales if not _may_overflow(scale))
        yield f"the GradScaler's scale is {scale:g}: to skip this step would not help"
    elif scales and without:
        yield f"no GradScaler is enabled on {name_ranks(without)}: not all ranks would skip this step"
    if any(damage.bad_weights for damage in concerned):
        yield "go back to finite parameters, and look at the step that broke them"
    elif stops:
        yield "nothing changed: mend the cause, or zero_grad() on all ranks drops this step"
    if not stops:
        yield (
            "every rank gets them now (said once until all are finite again); see legacy_ddp.Checks(nonfinite=...) to "
            "stop here instead"
        )


def _may_overflow(scale: float | None) -> bool:
    """Whether a GradScaler's scale excuses an infinity: at 1 or less it made none, at infinity it makes no other."""
    return scale is not None and 1 < scale < math.inf


def _say(damage: Damage) -> str:
    if damage.trouble:
        return f"looking failed: {damage.trouble}"
    if damage.damaged == damage.present > 1:
        hint = "" if damage.bad_weights else ": look at its loss and its input"
        words = [f"every gradient ({damage.damaged} of {damage.present} parameters){hint}"]
    else:
        words = [f"{name!r}: {_count_words(*counts)}" for name, counts in damage.counts.items()]
        words += _more(damage.damaged - len(damage.counts))
    if damage.bad_weights:
        names = [*map(repr, damage.weights), *_more(damage.bad_weights - len(damage.weights))]
        words.append(f"parameters that were not finite before this backward: {', '.join(names)}")
    return "; ".join(words)


def _more(count: int) -> list[str]:
    return [f"... {count} more"] if count else []


def _count_words(nan: int, inf: int, numel: int) -> str:
    counts = [f"{count} {what}" for count, what in ((nan, "NaN"), (inf, "inf")) if count]
    return f"{' and '.join(counts)} of {numel}".replace(" ", TIE)


def _look(plan: Plan, packed: Packed, scaler: LossScaler | None, *, scan: bool) -> Damage:
    try:
        scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None
        return _scan(plan, packed, scale) if scan else Damage({}, scale=scale)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for what this one says, whatever it is
        return Damage({}, trouble=error_line(error))


def _scan(plan: Plan, packed: Packed, scale: float | None) -> Damage:
    pieces = list(_pieces(plan, packed))
    found = {name: counts for name, piece in pieces if (counts := _count(piece))}
    weights = [
        slot.name
        for slot, parameter in zip(plan.layout.slots, plan.parameters, strict=True)
        if not torch.isfinite(parameter).all()
    ]
    named = dict(list(found.items())[:_MAX_NAMES])
    return Damage(named, len(found), len(pieces), weights[:_MAX_NAMES], len(weights), scale)


def _pieces(plan: Plan, packed: Packed) -> Iterator[tuple[str, torch.Tensor]]:
    """Every gradient that was packed and has elements; of sparse ones the values that are there."""
    for name, grad in packed.grads(plan):
        piece = grad.values() if grad is not None and grad.is_sparse else grad
        if piece is not None and piece.numel():
            yield name, piece


def _count(piece: torch.Tensor) -> tuple[int, int, int] | None:
    """(NaN, inf, elements); None if all are finite. A complex element with any NaN in it counts as NaN."""
    damaged = piece.numel() - int(torch.isfinite(piece).sum())
    if not damaged:
        return None
    nan = int(torch.isnan(piece).sum())
    return nan, damaged - nan, piece.numel()
