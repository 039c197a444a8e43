"""A summary as text of 80 columns. Pure."""

from collections.abc import Iterator

from legacy_ddp._compare import MAX_LINES, MAX_SIDES, name_ranks
from legacy_ddp._text import format_bytes, shorten, wrap
from legacy_ddp.debug._trace.coverage import span, spans
from legacy_ddp.debug._trace.line_format import PHASE_LABELS
from legacy_ddp.debug._trace.summary import Curve, Summary

MAX_TEXT = 40  # characters of a logged text


def lines(found: Summary) -> list[str]:
    """The lines of the text."""
    text = wrap(f"{found.folder}: {_count(found.world_size, 'rank')}, {_steps(found)}, begun {found.started}")
    for item in [*_ends(found), f"size: {_size(found)}", f"phases: {_phases(found)}", *_operations(found)]:
        text += wrap(item, "  ")
    for item in [*_norms(found), _nonfinite(found), *_waiting(found), *_metrics(found), *_logged(found)]:
        text += wrap(item, "  ")
    text += ["environment of all ranks:" if found.world_size > 1 else "environment:"]
    text += [line for fact, value in found.facts.items() for line in wrap(f"{fact}: {value}", "  ")]
    if found.own_facts:
        text += ["of some:"]
    for fact, holders in found.own_facts:
        values = [f"{value} on {name_ranks(ranks)}" for value, ranks in holders[:MAX_SIDES]]
        more = [f"{len(holders) - MAX_SIDES} more"] if len(holders) > MAX_SIDES else []
        text += wrap(f"{fact}: {'; '.join([*values, *more])}", "  ")
    return text


def _steps(found: Summary) -> str:
    if found.steps is None:
        return "no steps"
    every = f", every {found.every}" if found.every > 1 else ""
    return f"{span(found.steps)} ({found.recorded:,} recorded{every})"


def _ends(found: Summary) -> Iterator[str]:
    ends = list(found.ends.items())
    for end, ranks in ends[:MAX_SIDES]:
        group = "all ranks" if len(ranks) == found.world_size > 1 else name_ranks(ranks)
        yield f"end: {group}: {end}"
    if len(ends) > MAX_SIDES:
        yield f"... {len(ends) - MAX_SIDES} more ends"


def _size(found: Summary) -> str:
    total = format_bytes(found.size_bytes)
    if not found.recorded:
        return total
    return f"{total}, {format_bytes(found.size_bytes / found.recorded / found.world_size)} a step and rank"


def _phases(found: Summary) -> str:
    return ", ".join(f"{PHASE_LABELS[phase]} {number:,}" for phase, number in found.phases.items()) or "none"


def _operations(found: Summary) -> Iterator[str]:
    if not found.operations:
        return
    counts = [count for _, count in found.operations]
    least, greatest = min(counts), max(counts)
    number = f"{least:,}" if least == greatest else f"{least:,} to {greatest:,}"
    steps = spans([step for step, _ in found.operations])
    yield f"operations of forward and backward: {steps} ({number} a step and rank)"
    for ranks, lacking in found.missing_operations[:MAX_SIDES]:
        yield f"operations missing on {name_ranks(ranks)}: {spans(lacking)}"
    if len(found.missing_operations) > MAX_SIDES:
        yield f"... {len(found.missing_operations) - MAX_SIDES} more groups of ranks without operations of other ranks"


def _norms(found: Summary) -> Iterator[str]:
    if found.norms:
        norms = ", ".join(f"{norm:.6g} at step {step}" for step, norm in found.norms)
        yield f"norm of the reduced gradients: {norms}"


def _nonfinite(found: Summary) -> str:
    first = found.nonfinite
    if first is None:
        return "NaN or infinity in tensors: none"
    return (
        f"NaN or infinity in tensors: first at step {first.step} in {PHASE_LABELS[first.phase]} of rank {first.rank}: "
        f"{first.name}, {_count(first.count, 'element')}"
    )


def _waiting(found: Summary) -> Iterator[str]:
    if waiting := found.waiting:
        yield (
            f"waiting: others waited for rank {waiting.rank} in {waiting.steps:,} of {waiting.of_steps:,} steps; "
            f"the longest wait of a step beyond the shortest: {1000 * waiting.median_seconds:.3g} ms (median)"
        )


def _metrics(found: Summary) -> Iterator[str]:
    for curve in found.metrics[:MAX_LINES]:
        yield f"metric {curve.name!r}, sum over the ranks: {_ends_of(curve)}"
    yield from _more(len(found.metrics), "metrics")


def _logged(found: Summary) -> Iterator[str]:
    for curve in found.logged[:MAX_LINES]:
        others = f" (also logged by {name_ranks(curve.ranks[1:])})" if len(curve.ranks) > 1 else ""
        yield f"logged {curve.name!r}, rank {curve.ranks[0]}: {_ends_of(curve)}{others}"
    yield from _more(len(found.logged), "logged names")


def _more(number: int, noun: str) -> list[str]:
    return [f"... {number - MAX_LINES} more {noun}"] if number > MAX_LINES else []


def _ends_of(curve: Curve) -> str:
    ends = dict([curve.first, curve.last])
    return ", ".join(f"{_value(value)} at step {step}" for step, value in ends.items())


def _value(value: float | str) -> str:
    return shorten(value, MAX_TEXT) if isinstance(value, str) else f"{value:.6g}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
