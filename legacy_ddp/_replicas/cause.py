"""Since when do replicas differ, through whom, and why? Phases of all ranks, or what differs now -> a Verdict. Pure."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from legacy_ddp._compare import compare_rows, name_ranks
from legacy_ddp._replicas.trail import Phases


@dataclass(frozen=True)
class Verdict:
    """``phase``: one word, empty if nothing differs. ``since``, ``who``, ``cause``: in words. ``ranks``: at fault."""

    phase: str = ""
    since: str = ""
    who: str = ""
    cause: str = ""
    ranks: tuple[int, ...] = ()


NOTHING = Verdict()


@dataclass(frozen=True)
class Blame:
    """``ranks`` at fault; ``doers``: those with a deed of their own; ``words``: how that is known."""

    ranks: tuple[int, ...]
    doers: tuple[int, ...]
    words: str


@dataclass(frozen=True)
class _Reading:
    """What it means if ranks differ in one of the words.

    ``deed``: what a rank did of which ``did`` is true, although nothing should have done it.
    """

    phase: str
    word: Callable[[Phases], int]
    since: str
    cause: str
    did: Callable[[Phases], bool] = lambda _: False
    deed: str = ""


_BUFFERS = (
    "only buffers differ, often statistics of each rank's own data (BatchNorm, an average). If that is meant, name them"
    ' in local_buffers=, for instance ("*.running_*", "*.num_batches_tracked"); else call broadcast_buffers()'
)

_WRITTEN = (
    "parameters changed outside of a step(): a write to them, a checkpoint, memory that does not keep its bits, or a "
    "step() inside no_sync()"
)
_ALONE = "parameters changed outside of a step"

# In the order in which things come about: the first that differs is the cause of those after it.
_READINGS = (
    _Reading(
        "all_reduce",
        lambda p: p.reduced,
        "the reduction in {last}",
        "ranks left the call with other gradients: the transport, or memory that does not keep its bits",
    ),
    _Reading("step", lambda p: p.steps, "after {last}", "ranks made different numbers of {held}"),
    _Reading(
        "outside",
        lambda p: p.found,
        "between {last} and the step() after it",
        _WRITTEN,
        lambda p: p.changed_before,
        _ALONE,
    ),
    _Reading(
        "gradients",
        lambda p: p.used,
        "between {last} and the step() after it",
        "the call left equal gradients, step() found others: edited, clipped or dropped on some ranks alone, or left "
        "on a frozen parameter",
    ),
    _Reading(
        "step",
        lambda p: p.stepped,
        "the step() after {last}",
        "gradients were equal before step(), parameters not after it: learning rate, weight decay or optimizer state",
    ),
    _Reading(
        "start",
        lambda p: 0 if p.before else p.parameters,
        "the start (construction, or the last broadcast or report of this kind)",
        "other seeds with init_sync=False, a checkpoint loaded by some ranks only, or a write before the first call",
    ),
    _Reading(
        "outside",
        lambda p: p.parameters,
        "between {latest} and this call",
        _WRITTEN,
        lambda p: p.changed_after,
        _ALONE,
    ),
    _Reading("buffers", lambda p: p.buffers, "after {last}", _BUFFERS),
)


def judge_phases(phases: Sequence[Phases], last: int) -> Verdict:
    """The first thing in which ranks differ, and every rank with a deed of its own.

    ``last`` is the number of the last all_reduce(), 0 for none.
    """
    verdict = NOTHING
    for reading in _READINGS:
        values = [reading.word(of_rank) for of_rank in phases]
        if len(set(values)) == 1:
            continue
        found = blame(values, [reading.did(of_rank) for of_rank in phases], reading.deed)
        if not verdict.phase:
            call = f"call {last}" if last else "the start"
            latest = f"the step() after {call}" if any(of_rank.steps for of_rank in phases) else call
            since = reading.since.format(last=call, latest=latest)
            (held,) = compare_rows([{"steps": str(value)} for value in values]).differences
            cause = reading.cause.format(held=held)
            verdict = Verdict(reading.phase, since, found.words, cause, found.ranks)
        elif not set(found.doers) <= set(verdict.ranks):
            ranks = tuple(sorted({*verdict.ranks, *found.doers}))
            verdict = replace(verdict, who=f"{verdict.who}; {name_ranks(found.doers)}: {reading.deed}", ranks=ranks)
    return verdict


def judge_kinds(differing: Collection[str], compared: Collection[str], found: Blame) -> Verdict:
    """The reading of a moment: which kinds of things differ, where nothing is known of the phases before."""
    parameters = "parameters" in differing
    if "gradients" in differing and not parameters:
        phase, cause = "gradients", "parameters agree, gradients do not: edited on some ranks, or never reduced"
    elif "optimizer" in differing and parameters:
        phase, cause = "step", "an earlier step() had other gradients, optimizer state or hyperparameters"
    elif "optimizer" in differing:
        phase, cause = "step", "parameters agree, the optimizer does not: the next step() will part the replicas"
    elif parameters and "optimizer" in compared:
        phase = "unknown"
        cause = (
            "written outside of step(), memory that does not keep its bits, another start (seed, checkpoint), or "
            "hyperparameters that differed for a while"
        )
    elif parameters:
        phase, cause = "unknown", "parameters differ; pass optimizer= to tell a step() from a write"
    elif "buffers" in differing:
        phase, cause = "buffers", _BUFFERS
    else:
        return NOTHING
    return Verdict(
        phase, 'some time before this call (a wrapper with checks="detail" tells when)', found.words, cause, found.ranks
    )


def blame(values: Sequence[object], did: Sequence[bool] = (), deed: str = "") -> Blame:
    """Who of the ranks that hold ``values`` is at fault, as far as anything tells.

    A strict majority speaks against the others; it may be wrong, so the words give its size and do not call it right.
    Where there is none, a rank that ``did`` what nothing should have done (``deed``, in words) is the one, unless all
    ranks did.
    """
    (difference,) = compare_rows([{"": repr(value)} for value in values]).differences
    sides = difference.sides
    doers = tuple(rank for rank, is_doer in enumerate(did) if is_doer)
    doers = doers if len(doers) < len(values) else ()
    evidence = f"; {name_ranks(doers)}: {deed}" if doers else ""
    if suspects := difference.suspects:
        count = f"{len(difference.holders[0][1])} of {len(values)} ranks agree"
        return Blame(suspects, doers, f"{sides} ({count}){evidence}")
    if doers:
        return Blame(doers, doers, f"{sides}{evidence}")
    return Blame((), (), f"cannot attribute: {sides}, no majority")
