"""Since when do replicas differ, through whom, and why? Phases of all ranks, or what differs now -> a Verdict. Pure."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from legacy_ddp._compare import compare_rows, name_ranks
from legacy_ddp._replicas.phases import Phases


@dataclass(frozen=True)
class Verdict:
    """``phase``: one word, empty if nothing differs. ``since``, ``who``, ``cause``: in words.

    ``ranks``: at fault. ``minority``, ``implicated``: as in :class:`Blame`; of ``implicated`` all phases.
    """

    phase: str = ""
    since: str = ""
    who: str = ""
    cause: str = ""
    ranks: tuple[int, ...] = ()
    minority: tuple[int, ...] = ()
    implicated: tuple[int, ...] = ()


NOTHING = Verdict()


@dataclass(frozen=True)
class Blame:
    """What counting and evidence say of one difference; ``words``: the same for a reader.

    ``minority``: the ranks outside the strict majority; empty if there is none. ``implicated``: the ranks with evidence
    against them; empty if there is evidence against all.
    """

    minority: tuple[int, ...]
    implicated: tuple[int, ...]
    words: str

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks at fault. Evidence against a rank of the majority outranks the count: then nothing tells."""
        return () if _disagree(self.minority, self.implicated) else self.minority or self.implicated


@dataclass(frozen=True)
class _Reading:
    """What it means if ranks differ in one of the words.

    ``told``: what it is called, and how to say it of one rank, for ``{told}`` in ``cause``. ``deed``: what a rank did
    of which ``did`` is true, although nothing should have done it.
    """

    phase: str
    word: Callable[[Phases], int]
    since: str
    cause: str
    did: Callable[[Phases], bool] = lambda _: False
    deed: str = ""
    told: tuple[str, Callable[[Phases], str]] = ("", lambda _: "")


_BUFFERS = (
    "only buffers differ, often statistics of each rank's own data (BatchNorm, an average). If that is meant, name them"
    ' in local_buffers=, for instance ("*.running_*", "*.num_batches_tracked"); else call broadcast_buffers()'
)

_WRITTEN = (
    "parameters changed outside of a step(): a write to them, a checkpoint, memory that does not keep its bits, or a "
    "step() inside no_sync()"
)
_ALONE = "parameters changed outside of a step"
_LOST = "its optimizer holds a tensor that is not in the model, in place of a parameter"
STATE_ALONE = "optimizer state changed outside of a step"


def _say_steps(phases: Phases) -> str:
    is_elsewhere = phases.other_steps and not phases.steps
    other = f", and {phases.other_steps} of an optimizer that holds no parameter of the model" if is_elsewhere else ""
    return f"{phases.steps}{other}"


# In the order in which things come about: the first that differs is the cause of those after it.
_READINGS = (
    _Reading(
        "all_reduce",
        lambda p: p.reduced,
        "the reduction in {last}",
        "ranks left the call with other gradients: the transport, or memory that does not keep its bits",
    ),
    _Reading(
        "step",
        lambda p: p.steps,
        "after {last}",
        "ranks made different numbers of {told}",
        told=("steps", _say_steps),
    ),
    _Reading(
        "step",
        lambda p: p.held,
        "the step() after {last}",
        "optimizers do not hold the same parameters: left out of a list, or replaced in the model after the optimizer "
        "was made; {told}",
        lambda p: p.lost_parameter,
        _LOST,
        ("in optimizers", lambda p: p.holds),
    ),
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
        lambda p: p.state_changed_before,
        STATE_ALONE,
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
            verdict = _conclude(reading.phase, since, _say_cause(reading, phases), found)
        else:
            verdict = accuse(verdict, found.implicated, reading.deed)
    # Where a parameter was replaced after the call, the step left it as it was: that is why it changed.
    return accuse(verdict, [rank for rank in verdict.implicated if phases[rank].lost_parameter], _LOST)


def accuse(verdict: Verdict, ranks: Sequence[int], deed: str) -> Verdict:
    """``verdict`` with evidence of something else against ``ranks``; what counting and evidence leave open stays so."""
    if not ranks or f"{name_ranks(ranks)}: {deed}" in verdict.who:
        return verdict
    is_open = verdict.minority and not verdict.ranks
    return replace(
        verdict,
        who=f"{verdict.who}; {name_ranks(ranks)}: {deed}",
        ranks=() if is_open else tuple(sorted({*verdict.ranks, *ranks})),
        implicated=tuple(sorted({*verdict.implicated, *ranks})),
    )


def judge_kinds(differing: Collection[str], compared: Collection[str], found: Blame) -> Verdict:
    """The reading of a moment: which kinds of things differ, where nothing is known of the phases before."""
    parameters = "parameters" in differing
    if "gradients" in differing and not parameters:
        phase, cause = "gradients", "parameters agree, gradients do not: edited on some ranks, or never reduced"
    elif "optimizer" in differing and parameters:
        phase = "step"
        cause = "an earlier step() had other gradients, optimizer state, hyperparameters or parameters to update"
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
    return _conclude(phase, 'some time before this call (a wrapper with checks="detail" tells when)', cause, found)


def blame(values: Sequence[object], did: Sequence[bool] = (), deed: str = "") -> Blame:
    """Who of the ranks that hold ``values`` is at fault, as far as anything tells; see :func:`weigh`."""
    (difference,) = compare_rows([{"": repr(value)} for value in values]).differences
    count = f" ({len(difference.holders[0][1])} of {len(values)} ranks agree)" if difference.suspects else ""
    return weigh(f"{difference.sides}{count}", difference.suspects, did, deed)


def weigh(sides: str, minority: Sequence[int], did: Sequence[bool], deed: str) -> Blame:
    """Counting and evidence together. ``sides``: who stands against whom, in words.

    A strict majority speaks against the others; it may be at fault, so no words call it right. A rank that ``did`` what
    nothing should have done (``deed``, in words) has evidence against it, unless all ranks did.
    """
    implicated = () if all(did) else tuple(rank for rank, is_doer in enumerate(did) if is_doer)
    if not minority and not implicated:
        return Blame((), (), f"cannot attribute: {sides}, no majority")
    evidence = [f"{name_ranks(implicated)}: {deed}"] if implicated else []
    doubt = ["count and evidence disagree"] if _disagree(minority, implicated) else []
    return Blame(tuple(minority), implicated, "; ".join([sides, *evidence, *doubt]))


def _disagree(minority: Collection[int], implicated: Collection[int]) -> bool:
    """Whether there is evidence against a rank of the majority."""
    return bool(minority) and not set(implicated) <= set(minority)


def _conclude(phase: str, since: str, cause: str, found: Blame) -> Verdict:
    return Verdict(phase, since, found.words, cause, found.ranks, found.minority, found.implicated)


def _say_cause(reading: _Reading, phases: Sequence[Phases]) -> str:
    what, say = reading.told
    told = compare_rows([{what: say(of_rank)} for of_rank in phases]).differences
    return reading.cause.format(told=told[0] if told else f"{what}: as many on every rank, but others")
