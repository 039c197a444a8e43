"""The words of a report: the evidence, and the place with the cause. Pure."""

from collections.abc import Iterator, Sequence

from legacy_ddp._compare import MISSING, Difference, name_ranks
from legacy_ddp.debug._cross_check.cause import cause_of
from legacy_ddp.debug._cross_check.place import Place
from legacy_ddp.debug._cross_check.report import CrossCheckReport
from legacy_ddp.debug._cross_check.settings_text import describe_settings
from legacy_ddp.debug._cross_check.verdict import RING, Verdict
from legacy_ddp.debug._operations.describe import Labels, details, numbers, summary
from legacy_ddp.debug._operations.explain import Explanation, Facts
from legacy_ddp.debug._operations.operation import OperationDifference


def report_of(
    call: str,
    size: int,
    compared: int,
    batch: int,
    verdict: Verdict,
    differing: Sequence[str],
    place: Place,
    settings: Sequence[Difference],
) -> CrossCheckReport:
    """The report after a difference. ``compared``: the number of results; ``differing``: names of results."""
    cause = cause_of(verdict, place, _labels(verdict), _facts(verdict, settings))
    operation = place.difference.operation if place.difference else None
    return CrossCheckReport(
        call=call,
        size=size,
        verdict=verdict.kind,
        ranks=verdict.ranks,
        batch=batch,
        differing=tuple(differing),
        module=operation.module if operation else "",
        operation=operation.name if operation else "",
        stage=operation.stage if operation else "",
        elements=place.elements,
        settings=tuple(describe_settings(settings)),
        compared=compared,
        who=_who(verdict, batch, size),
        place=tuple(_place(place, verdict, cause)),
        next_step=cause.next_step,
    )


def _facts(verdict: Verdict, settings: Sequence[Difference]) -> Facts:
    """The settings with a value on all ranks that compute alike, and another on the rank that differs."""
    odd, reference = verdict.odd, verdict.reference
    if odd is None or reference is None or odd.rank == reference.rank:
        return {}
    sides = [next(group for group in verdict.groups if item.rank in group) for item in (odd, reference)]
    found = {}
    for item in settings:
        values = [{_value(item, rank) for rank in ranks} for ranks in sides]
        if all(len(side) == 1 for side in values) and values[0] != values[1]:
            found[item.name] = (values[0].pop(), values[1].pop())
    return found


def _value(item: Difference, rank: int) -> str:
    return next((value for value, ranks in item.holders if rank in ranks), MISSING)


def _who(verdict: Verdict, batch: int, size: int) -> str:
    """The evidence, from the runs of the examined batch."""
    batches = f"of 2 runs of the batch of rank {batch}"
    if verdict.kind == "nondeterministic":
        stable = sorted({*range(size)} - {*verdict.ranks})
        other = f"; {_agree(stable)}" if stable else ""
        places = name_ranks(verdict.ranks) if stable or size == 1 else "every rank"
        return f"the results {batches} differ on {places}{other}"
    runs = f"{batches} on every rank"
    if verdict.kind == "once" and len(verdict.ranks) > 1:
        return f"the first run of every batch differs from the run on the next rank, and no result {runs}"
    if verdict.kind == "once":
        return f"the first result of {name_ranks(verdict.ranks)} differs from all results {runs}"
    if not verdict.is_attributed:
        sides = " against ".join(map(name_ranks, verdict.groups))
        return f"{sides}, in both {runs}: no majority, and no rank disagrees with itself"
    agreeing = f"{len(verdict.groups[0])} of {size} ranks agree"
    return f"{name_ranks(verdict.ranks)} against {name_ranks(verdict.groups[0])} ({agreeing}), in both {runs}"


def _agree(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} {'agree' if len(ranks) > 1 else 'agrees'} with {_THEMSELVES[len(ranks) > 1]}"


_THEMSELVES = {False: "itself", True: "themselves"}


def _number(place: Place, found: OperationDifference, labels: Labels) -> str:
    """The number of the different operation, for example ``operation 94 of 120``."""
    a, b = found.numbers
    return f"{numbers((a, b), labels)}{f' of {place.last:,}' if a and a == b else ''}"


def _labels(verdict: Verdict) -> Labels:
    odd, reference = verdict.odd, verdict.reference
    if odd is None or reference is None:
        return "A", "B"
    if odd.rank != reference.rank:
        sides = (next(group for group in verdict.groups if item.rank in group) for item in (odd, reference))
        odd_ranks, reference_ranks = map(name_ranks, sides)
        return odd_ranks, reference_ranks
    return ("the first run", "a later run") if odd.run == RING else ("one run", "the next run")


def _place(place: Place, verdict: Verdict, cause: Explanation) -> Iterator[str]:
    """Where, why, and the reason for missing elements."""
    found, labels = place.difference, _labels(verdict)
    if found is None:
        reason = f"all {place.count:,} captured operations agree, and no operation of another thread is captured"
        if place.note:
            reason = place.note
        elif verdict.kind == "once" and not place.count:
            reason = "operations were not captured in the first run; operations=True captures them"
        yield f"where: not known: {reason}"
        if verdict.kind == "once" and cause.meaning:
            yield f"why: {cause.meaning}"
        return
    sides = f"; {labels[0]} (here) against {labels[1]} (there)" if place.elements else ""
    yield f"where: {summary(found, labels)}, {_number(place, found, labels)}{sides}"
    yield f"why: {cause.meaning}"
    yield from (text for text in details(found, labels) if not text.startswith(("input", "output")))  # digests
    if place.note:
        yield place.note
