"""Verdict of a cross-check: which ranks compute differently, and the report in words. Pure.

Both sides of a cross-check have the same batch, so fewer causes are possible than between two traces.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from legacy_ddp._explain.element_compare import ElementDifference
from legacy_ddp._text import MAX_LINES, MISSING, Difference, group_ranks, name_ranks, outside_majority, wrap
from legacy_ddp.debug._operations.meaning import (
    CROSS_CHECK,
    Explanation,
    Facts,
    Rule,
    always,
    explain,
    explain_by,
    has_unknown_source,
)
from legacy_ddp.debug._operations.operation import Labels, OperationDifference, details, numbers, summary
from legacy_ddp.debug._trace.environment import MODULE, RUN, describe_settings, name_setting

Digests = tuple[int, ...]
Kind = Literal["equal", "differs", "once", "nondeterministic"]
# The runs of a batch: in the ring on its own rank and on the next rank, then two repetitions on every rank.
ON_ITS_RANK, ON_NEXT_RANK, REPEAT, LATER_REPEAT = "on its rank", "on the next rank", "repeat", "later repeat"
RING_RUNS = (ON_ITS_RANK, ON_NEXT_RANK)
_WORDS = {
    "equal": "all ranks compute the same",
    "differs": "{ranks} {compute} differently",
    "once": "{ranks} computed differently once",
    "nondeterministic": "{ranks} {compute} differently from run to run",
}


@dataclass(frozen=True)
class Witness:
    """A run of the examined batch on ``rank``. ``run``: one of :data:`RING_RUNS`, or a repetition."""

    rank: int
    run: str


@dataclass(frozen=True)
class Verdict:
    """``ranks``: the ranks that compute differently; without a majority the ranks of all sides.

    ``groups``: the ranks with equal results, the largest group first. ``odd``, ``reference``: two runs with different
    results; ``odd`` is on one of ``ranks``.
    """

    kind: Kind
    ranks: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    odd: Witness
    reference: Witness

    @property
    def is_attributed(self) -> bool:
        """Whether ``ranks`` are outside of a majority, or disagree with themselves."""
        return self.kind in ("once", "nondeterministic") or bool(outside_majority(self.groups))

    def group_of(self, witness: Witness) -> tuple[int, ...]:
        return next(group for group in self.groups if witness.rank in group)


def differing_batches(on_its_rank: Sequence[Digests | None], on_next_rank: Sequence[Digests | None]) -> list[int]:
    """The ranks whose batch gave other results on the next rank.

    ``on_its_rank[r]``, ``on_next_rank[r]``: digests for the batch of rank r, on rank r and on the next rank. None
    without a batch.
    """
    pairs = zip(on_its_rank, on_next_rank, strict=True)
    return [rank for rank, (digests, next_digests) in enumerate(pairs) if digests != next_digests]


def choose_batch(batches: Sequence[int], size: int) -> int:
    """The batch to examine: that of a rank with two disagreements, otherwise the first of ``batches``."""
    # A rank with a constant fault disagrees about its own batch and about the batch of the rank before.
    common = [rank for rank in batches if (rank - 1) % size in batches]
    return common[0] if common else batches[0]


def judge(ring: Mapping[Witness, Digests], repeats: Sequence[tuple[Digests, Digests]]) -> Verdict:
    """The verdict about one batch.

    ``ring``: the different digests of the two runs in the ring. ``repeats[r]``: digests of two later runs on rank r.
    """
    values = [first for first, _ in repeats]
    groups = tuple(ranks for _, ranks in group_ranks(values))
    unstable = tuple(rank for rank, (first, second) in enumerate(repeats) if first != second)
    if unstable:
        odd, reference = Witness(unstable[0], REPEAT), Witness(unstable[0], LATER_REPEAT)
        return Verdict("nondeterministic", unstable, groups, odd, reference)
    if len(groups) > 1:
        ranks = outside_majority(groups) or tuple(range(len(repeats)))
        return Verdict("differs", ranks, groups, Witness(groups[1][0], REPEAT), Witness(groups[0][0], REPEAT))
    # The two runs in the ring differ, and all repetitions are equal: at least one run in the ring differs from them.
    changed = sorted((run for run, digests in ring.items() if digests != values[0]), key=lambda run: run.rank)
    ranks = tuple(dict.fromkeys(run.rank for run in changed))  # one rank made both runs if it is the only rank
    return Verdict("once", ranks, groups, changed[0], Witness(ranks[0], REPEAT))


@dataclass(frozen=True)
class Place:
    """``difference``: of operations, None without one. ``elements``: of the first differing output, None if not known.

    ``count``: number of operations of the differing run. ``last``: the number of the last of them. ``note``: why the
    difference or the elements are missing, or empty. ``is_intermittent``: the output was equal in one more run.
    """

    difference: OperationDifference | None = None
    elements: ElementDifference | None = None
    count: int = 0
    last: int = 0
    note: str = ""
    is_intermittent: bool = False


@dataclass(frozen=True, repr=False)
class CrossCheckReport:
    """The result of :func:`cross_check`; equal on all ranks.

    ``call``: operation and number of the call. ``size``: the number of ranks. ``verdict``:

    ====================  ==============================================================================================
    ``equal``             every batch gave the same bits on its own rank and on the next rank
    ``differs``           ``ranks`` compute the batch of rank ``batch`` differently, in every run
    ``once``              ``ranks`` computed differently once, and not in two more runs on every rank
    ``nondeterministic``  two runs of a batch differ on ``ranks``
    ====================  ==============================================================================================

    ``ranks``: empty if equal; all ranks if there is no majority, for example with two ranks. ``batch``: the rank of the
    examined batch. ``compared``: the number of results; ``differing``: names of the results with a difference.
    ``module``, ``operation``, ``stage``: of the first different operation; empty if not known. ``elements``: of its
    output, None if not known. ``settings``: after a difference, the settings with different values on the ranks, as
    texts (one text for more than three modules in the same mode). ``who``, ``place``, ``next_step``: phrases for a
    reader.

    Example:
        >>> cross_check(model, lambda model, batch: model(batch).sum(), inputs).verdict
        'equal'
    """

    call: str
    size: int
    verdict: Kind = "equal"
    ranks: tuple[int, ...] = ()
    batch: int | None = None
    differing: tuple[str, ...] = ()
    module: str = ""
    operation: str = ""
    stage: str = ""
    elements: ElementDifference | None = None
    settings: tuple[str, ...] = ()
    compared: int = 0
    who: str = ""
    place: tuple[str, ...] = ()
    next_step: str = ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._headline()}>"

    @property
    def agrees(self) -> bool:
        """Whether all ranks compute the same."""
        return self.verdict == "equal"

    def __str__(self) -> str:
        lines = wrap(self._headline())
        if self.agrees:
            return "\n".join(lines)
        lines += wrap(f"who: {self.who}", "  ")
        first = f", first {self.differing[0]}" if self.differing else ""
        lines += wrap(f"results: {len(self.differing)} of {self.compared} differ{first}", "  ")
        where, *why = (wrap(text, "  ") for text in self.place)
        lines += [*where, *(self.elements.lines("    ") if self.elements else []), *chain.from_iterable(why)]
        lines += [line for item in self.settings[:MAX_LINES] for line in wrap(f"setting {item}", "  ")]
        if len(self.settings) > MAX_LINES:
            lines.append(f"  ... {len(self.settings) - MAX_LINES} more settings")
        return "\n".join([*lines, *wrap(f"next: {self.next_step}", "  ")])

    def _headline(self) -> str:
        verb = "compute" if len(self.ranks) > 1 else "computes"
        words = _WORDS[self.verdict].format(ranks=name_ranks(self.ranks), compute=verb)
        counts = f": {self.size} rank{'s' * (self.size > 1)}, {self.compared} results of each batch" * self.agrees
        return f"{self.call}: {words}{counts}"


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
    """The report after a difference. Arguments as in :class:`CrossCheckReport`."""
    labels = _labels(verdict)
    cause = explain_by(_CAUSES, _Case(verdict, place, labels, _facts(verdict, settings)))
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
        place=tuple(_where(place, verdict, labels, cause)),
        next_step=cause.next_step,
    )


def _labels(verdict: Verdict) -> Labels:
    odd, reference = verdict.odd, verdict.reference
    if odd.rank != reference.rank:
        return name_ranks(verdict.group_of(odd)), name_ranks(verdict.group_of(reference))
    return ("an earlier run", "a later run") if odd.run in RING_RUNS else ("one run", "the next run")


def _facts(verdict: Verdict, settings: Sequence[Difference]) -> Facts:
    """The settings with one value on all ranks of one side, and another value on all ranks of the other side."""
    odd, reference = verdict.odd, verdict.reference
    if odd.rank == reference.rank:
        return {}
    found = {}
    for item in settings:
        here, there = ({_value(item, rank) for rank in verdict.group_of(side)} for side in (odd, reference))
        if len(here) == len(there) == 1 and here != there:
            found[item.name] = (here.pop(), there.pop())
    return found


def _value(item: Difference, rank: int) -> str:
    return next((value for value, ranks in item.holders if rank in ranks), MISSING)


def _who(verdict: Verdict, batch: int, size: int) -> str:
    batches = f"of 2 runs of the batch of rank {batch}"
    if verdict.kind == "nondeterministic":
        stable = sorted({*range(size)} - {*verdict.ranks})
        agree = "agree with themselves" if len(stable) > 1 else "agrees with itself"
        other = f"; {name_ranks(stable)} {agree}" if stable else ""
        places = name_ranks(verdict.ranks) if stable or size == 1 else "every rank"
        return f"the results {batches} differ on {places}{other}"
    runs = f"{batches} on every rank"
    if verdict.kind == "once" and len(verdict.ranks) > 1:
        return f"the first run of every batch differs from the run on the next rank, and no result {runs}"
    if verdict.kind == "once":
        return f"an earlier result of {name_ranks(verdict.ranks)} differs from all results {runs}"
    if not verdict.is_attributed:
        sides = " against ".join(map(name_ranks, verdict.groups))
        return f"{sides}, in both {runs}: no majority, and no rank disagrees with itself"
    agreeing = f"{len(verdict.groups[0])} of {size} ranks agree"
    return f"{name_ranks(verdict.ranks)} against {name_ranks(verdict.groups[0])} ({agreeing}), in both {runs}"


def _where(place: Place, verdict: Verdict, labels: Labels, cause: Explanation) -> Iterator[str]:
    found = place.difference
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
    a, b = found.numbers
    number = f"{numbers((a, b), labels)}{f' of {place.last:,}' if a and a == b else ''}"
    sides = f"; {labels[0]} (here) against {labels[1]} (there)" if place.elements else ""
    yield f"where: {summary(found, labels)}, {number}{sides}"
    yield f"why: {cause.meaning}"
    yield from (text for text in details(found, labels) if not text.startswith(("input", "output")))  # digests
    if place.note:
        yield place.note


@dataclass(frozen=True)
class _Case:
    """A verdict with its place, and the attributes that the rows ask for. ``facts``: see :func:`_facts`."""

    verdict: Verdict
    place: Place
    labels: Labels
    facts: Facts

    @property
    def kind(self) -> str:
        return self.verdict.kind

    @property
    def found(self) -> OperationDifference | None:
        return self.place.difference

    @property
    def has_other_generator(self) -> bool:
        found = self.found
        return bool(found and found.kind == "output" and found.a[0].generator != found.b[0].generator)

    @property
    def is_other_call(self) -> bool:
        """Whether the two runs made other calls: other operations, or other arguments of one operation."""
        found = self.found
        is_other = found and (found.kind in ("sequence", "order", "form") or found.a[0].settings != found.b[0].settings)
        return bool(is_other)

    @property
    def of_operation(self) -> Explanation:
        if self.found is None:
            return Explanation("", "")
        # Results differ: if no values of common operations do, operations of only one side may be the cause.
        completed = replace(self.found, tensors_differ=not self.found.has_effect)
        return explain(completed, self.labels, self.facts)

    @property
    def between_ranks(self) -> Explanation:
        found = self.of_operation
        # A cross-check is no next step after a cross-check.
        if self.found is None or found.next_step.endswith(CROSS_CHECK):
            return explain_by([_OTHER_KERNEL], self)
        return Explanation(found.meaning, found.next_step.replace("diff again", "check again"))

    @property
    def held(self) -> str:
        return next((name for name in self.facts if name.startswith(RUN)), "")

    @property
    def module(self) -> str:
        return next((name_setting(name) for name in self.facts if name.startswith(MODULE)), "")


_OTHER_KERNEL = Rule(
    always,
    "the same inputs give other outputs on {c.labels[0]} than on {c.labels[1]}, in every run: another library or "
    "extension, a kernel that is wrong on one side, or hardware",
    "compare libraries, extensions and hardware of these ranks; start the job again with the rank on another device, "
    "and see whether the difference stays with the device",
)
_FIND_UNSTABLE = (
    "torch.use_deterministic_algorithms(True) names the operations of torch that are not deterministic; after it only "
    "custom operations, threads and hardware remain"
)

_CAUSES = (
    Rule(
        lambda c: c.kind == "once" and len(c.verdict.ranks) > 1,
        "state of a first run: a warm-up, a lazy cache, a counter",
        "run one batch before the first cross-check, and keep state in buffers",
    ),
    Rule(
        lambda c: c.found and has_unknown_source(c.found),
        "both runs had the same batch: state kept outside of parameters and buffers (an attribute of a module, a value "
        "inside of an object that run holds), data that run reads itself, or a kernel that is not recorded "
        "(torch.compile)",
        "keep such state in buffers, or take it out of run(); check again without torch.compile",
    ),
    Rule(
        lambda c: c.has_other_generator,
        "random numbers from another place of the generator: both runs began with equal states, so that one side set a "
        "seed, drew more, or has a generator of its own",
        "look for seeds and draws inside of run and of the model",
    ),
    Rule(
        lambda c: c.kind == "differs" and c.place.is_intermittent,
        "the same inputs gave other outputs in two runs, and equal outputs in a third: a kernel that is wrong at "
        "times, memory or hardware",
        "start the job again with the rank on another device, and see whether the difference stays with the device",
    ),
    Rule(
        lambda c: c.kind == "differs" and c.held,
        "{c.between_ranks.meaning}",
        "if the loss depends on {c.held}, make it equal on all ranks, or pass it in the batch",
    ),
    Rule(
        lambda c: c.kind == "differs" and c.module,
        "{c.between_ranks.meaning}",
        "give {c.module} the same mode on all ranks, with train() or eval()",
    ),
    Rule(lambda c: c.kind == "differs", "{c.between_ranks.meaning}", "{c.between_ranks.next_step}"),
    Rule(
        lambda c: c.is_other_call,
        "state in Python that a run changes: a counter, a cache, an attribute of a module",
        "keep such state in buffers, or take it out of run()",
    ),
    Rule(
        lambda c: c.kind == "once" and c.found,
        "{c.of_operation.meaning}",
        "cross-check more often; a single event is memory or hardware, or a kernel that is rarely wrong",
    ),
    Rule(
        lambda c: c.kind == "once",
        "",
        "cross-check more often with operations=True, to name the operation of the next time; a single event is state "
        "of a first run in Python, memory or hardware, or a kernel that is rarely wrong",
    ),
    Rule(
        lambda c: c.found is None or c.found.kind == "output",
        "the same inputs gave other outputs in two runs on one rank: a kernel that is not deterministic (atomic "
        "additions, threads), or memory or hardware",
        _FIND_UNSTABLE,
    ),
    Rule(always, "{c.of_operation.meaning}", _FIND_UNSTABLE),
)
