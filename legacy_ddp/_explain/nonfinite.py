"""Which gradients and weights have NaN or infinity, on which ranks, and what to do. Pure."""

from collections.abc import Iterator, Sequence

from legacy_ddp._call.nonfinite import NonFinite, may_overflow
from legacy_ddp._check_settings import Nonfinite
from legacy_ddp._settings import Settings
from legacy_ddp._text import MAX_LINES, TIE, name_ranks, wrap


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
    """See :meth:`Explainer.nonfinite`."""
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
