"""Attribution of a difference between replicas: phase, cause and implicated ranks. Pure.

The evidence of each rank is its digests at the phases since the last call.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from legacy_ddp._replicas.history import StepDigests
from legacy_ddp._text import Difference, compare_rows, name_ranks

_BUFFERS = "only buffers differ"
_LOCAL_BUFFERS = (
    'If that is meant, name them in local_buffers=, for instance ("*.running_*", "*.num_batches_tracked"); else call '
    "broadcast_buffers()"
)
_REGISTERED = (
    "Some ranks have registered, resized or replaced a buffer that others have not, in a branch of forward for instance"
)
_WRITTEN = (
    "parameters changed outside of a step(): a write to them, a checkpoint, memory that does not keep its bits, or a "
    "step() inside no_sync()"
)
_PARAMETERS_CHANGED = "parameters changed outside of a step"
_STALE_PARAMETER = "its optimizer holds a tensor that is not in the model, in place of a parameter"
STATE_CHANGED = "optimizer state changed outside of a step"
_IN_STEP = "gradients were equal before step(), parameters not after it: learning rate, weight decay or optimizer state"
_IN_EARLIER_STEP = "an earlier step() had other gradients, optimizer state, hyperparameters or parameters to update"
_NEXT_STEP = "the next step() will make the replicas differ"
_IN_NEXT_STEP = f"parameters agree, the optimizer does not: {_NEXT_STEP}"


@dataclass(frozen=True)
class Verdict:
    """The result of counting and evidence. ``since``, ``who`` and ``cause`` are texts for a reader."""

    phase: str = ""  # one word; empty if nothing differs
    since: str = ""
    who: str = ""
    cause: str = ""
    ranks: tuple[int, ...] = ()  # at fault; empty with evidence against the majority: the minority may then be right
    minority: tuple[int, ...] = ()  # the ranks outside the strict majority; empty without a strict majority
    implicated: tuple[int, ...] = ()  # with evidence against them, from any phase; empty with evidence against all


NOTHING = Verdict()


@dataclass(frozen=True)
class _Rule:
    """What it means if ``digest`` differs between ranks."""

    phase: str
    digest: Callable[[StepDigests], int]
    since: str
    cause: str
    has_evidence: Callable[[StepDigests], bool] = lambda _: False  # of a fault of the rank with these digests
    evidence: str = ""  # the text of this fault
    # A label and a value, for {detail} in `cause`.
    detail: tuple[str, Callable[[StepDigests], str]] = ("", lambda _: "")


def _format_steps(digests: StepDigests) -> str:
    is_elsewhere = digests.other_steps and not digests.steps
    other = f", and {digests.other_steps} of an optimizer that holds no parameter of the model" if is_elsewhere else ""
    return f"{digests.steps}{other}"


AT_START = _Rule(
    "start",
    lambda d: 0 if d.parameters_at_call else d.parameters,
    "the start (construction, or the last broadcast or report of this kind)",
    "other seeds with init_sync=False, a checkpoint loaded by some ranks only, or a write before the first call",
)

# In the order of the phases: the first difference causes the later differences.
_RULES = (
    _Rule(
        "all_reduce",
        lambda d: d.gradients_at_call,
        "the reduction in {last}",
        "ranks left the call with other gradients: the transport, or memory that does not keep its bits",
    ),
    _Rule(
        "step",
        lambda d: d.steps,
        "after {last}",
        "ranks made different numbers of {detail}",
        detail=("steps", _format_steps),
    ),
    _Rule(
        "step",
        lambda d: d.membership,
        "the step() after {last}",
        "optimizers do not hold the same parameters: left out of a list, or replaced in the model after the optimizer "
        "was made; {detail}",
        lambda d: d.has_stale_parameter,
        _STALE_PARAMETER,
        ("in optimizers", lambda d: d.membership_text),
    ),
    _Rule(
        "outside",
        lambda d: d.parameters_at_step,
        "between {digest} and the step() after {last}",
        _WRITTEN,
        lambda d: d.changed_before,
        _PARAMETERS_CHANGED,
    ),
    _Rule(
        "gradients",
        lambda d: d.gradients_at_step,
        "before the step() after {last}",
        "the call left equal gradients, step() found others: edited, clipped or dropped on some ranks alone, or left "
        "on a frozen parameter",
    ),
    _Rule(
        "step",
        lambda d: d.parameters_after_step,
        "{step}",
        _IN_STEP,
        lambda d: d.state_changed_before,
        STATE_CHANGED,
    ),
    AT_START,
    _Rule(
        "outside",
        lambda d: d.parameters,
        "between {latest} and this call",
        _WRITTEN,
        lambda d: d.changed_after,
        _PARAMETERS_CHANGED,
    ),
    _Rule("buffers", lambda d: d.buffers, "after {last}", _BUFFERS),
)


def attribute_digests(digests: Sequence[StepDigests], last: int) -> Verdict:
    """The first phase in which ranks differ, and every rank with evidence from any phase.

    ``last``: the number of the last all_reduce(); 0 before the first.
    """
    verdict = NOTHING
    for rule in _RULES:
        values = [rule.digest(of_rank) for of_rank in digests]
        if len(set(values)) == 1:
            continue
        found = attribute_values(values, [rule.has_evidence(of_rank) for of_rank in digests], rule.evidence)
        if not verdict.phase:
            since = rule.since.format_map(_moments(digests, last))
            verdict = replace(found, phase=rule.phase, since=since, cause=_format_cause(rule, digests))
        else:
            verdict = add_evidence(verdict, found.implicated, rule.evidence)
    # A parameter that was replaced after the call is not changed by a step: this explains the evidence against a rank.
    stale = [rank for rank in verdict.implicated if digests[rank].has_stale_parameter]
    return add_evidence(verdict, stale, _STALE_PARAMETER)


def name_digest(last: int) -> str:
    """When the digest of call ``last`` was taken at the earliest. Replicas agreed in this digest.

    The first forward for a call takes the digest. A layer may then write to its weights, and a step inside no_sync()
    may follow: neither is in the digest.
    """
    if last > 1:
        return f"the first forward after call {last - 1}"
    return "the first forward" if last else "the start"


def _moments(digests: Sequence[StepDigests], last: int) -> dict[str, str]:
    call, digest = f"call {last}" if last else "the start", name_digest(last)
    step = f"the step() after {call}"
    return {
        "last": call,
        "digest": digest,
        # A step with a closure is examined at its end alone.
        "step": step
        if all(of_rank.parameters_at_step for of_rank in digests)
        else f"between {digest} and the end of {step}",
        "latest": step if any(of_rank.steps for of_rank in digests) else digest,
    }


def add_evidence(verdict: Verdict, ranks: Sequence[int], evidence: str) -> Verdict:
    if not ranks or f"{name_ranks(ranks)}: {evidence}" in verdict.who:
        return verdict
    is_open = verdict.minority and not verdict.ranks  # the count and the earlier evidence disagree
    return replace(
        verdict,
        who=f"{verdict.who}; {name_ranks(ranks)}: {evidence}",
        ranks=() if is_open else tuple(sorted({*verdict.ranks, *ranks})),
        implicated=tuple(sorted({*verdict.implicated, *ranks})),
    )


def add_optimizer_cause(verdict: Verdict, lost: str, settings: Sequence[str]) -> Verdict:
    """``verdict`` with the cause that the optimizer entries show, if the cause so far is only "a step()".

    ``lost``: how optimizer state was lost, as text. ``settings``: the names of the hyperparameters that differ.
    """
    # An earlier phase keeps its cause: other gradients, for example, lead to other optimizer state, too.
    if verdict.cause not in (_IN_STEP, _IN_EARLIER_STEP, _IN_NEXT_STEP):
        return verdict
    if lost:
        return replace(verdict, cause=f"{lost}; {_NEXT_STEP}" if verdict.cause == _IN_NEXT_STEP else lost)
    if settings and verdict.cause != _IN_NEXT_STEP:
        names = ", ".join(f"`{name}`" for name in settings)
        reasons = "made with other values, changed on some ranks, or ranks count steps differently"
        return replace(verdict, cause=f"a step() with other hyperparameters ({names}): {reasons}")
    return verdict


def add_reading_of_buffers(verdict: Verdict, buffers: Sequence[Difference], unlike: Sequence[str] = ()) -> Verdict:
    """If only buffers differ: ``verdict`` with a cause. The cause depends on the ranks that agree in ``buffers``.

    ``unlike``: the names of the buffers that some ranks lack, or hold with another dtype or shape.
    """
    if verdict.cause != _BUFFERS or not buffers:
        return verdict
    if unlike:
        more = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
        return replace(verdict, cause=f"{_BUFFERS}, and ranks do not hold the same: {unlike[0]}{more}. {_REGISTERED}")
    # Only floats count: counters, which are integers, may be equal by chance.
    shared = [item for item in buffers if "float" in item.holders[0][0] and len(item.holders[0][1]) > 1]
    if shared:
        others = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        reading = (
            f"{_BUFFERS}, and {name_ranks(shared[0].holders[0][1])} agree in {shared[0].name}{others}: a write or a "
            "checkpoint on some ranks, or memory that does not keep its bits. Statistics of each rank's own data would "
            "differ on every rank. Call broadcast_buffers(src=...) from a good rank"
        )
    elif all(len(item.holders) == sum(len(ranks) for _, ranks in item.holders) > 2 for item in buffers):
        reading = (
            f"{_BUFFERS}, and every rank has its own: statistics of each rank's own data (BatchNorm, an average), or "
            f"another start on every rank. {_LOCAL_BUFFERS}"
        )
    else:
        reading = (
            f"{_BUFFERS}, and counting ranks does not tell: statistics of each rank's own data (BatchNorm, an "
            "average), values that each rank has drawn (to keep them, see ignore= of the wrapper), or a write or a "
            "checkpoint on some ranks. For a write, call broadcast_buffers(src=...) from a "
            f"good rank. Statistics: {_LOCAL_BUFFERS[0].lower()}{_LOCAL_BUFFERS[1:]}"
        )
    return replace(verdict, cause=reading)


def attribute_kinds(differing: Collection[str], compared: Collection[str], found: Verdict) -> Verdict:
    """``found`` with phase and cause from the kinds of items that differ now, where the earlier phases are unknown."""
    parameters = "parameters" in differing
    if "gradients" in differing and not parameters:
        phase, cause = "gradients", "parameters agree, gradients do not: edited on some ranks, or never reduced"
    elif "optimizer" in differing and parameters:
        phase, cause = "step", _IN_EARLIER_STEP
    elif "optimizer" in differing:
        phase, cause = "step", _IN_NEXT_STEP
    elif parameters and "optimizer" in compared:
        phase = "unknown"
        cause = (
            "written outside of step(), memory that does not keep its bits, another start (seed, checkpoint), or "
            "hyperparameters that differed for a while"
        )
    elif parameters:
        phase = "unknown"
        cause = "another start (seed, checkpoint), a step() or a write; check_replicas(model, optimizer) tells more"
    elif "buffers" in differing:
        phase, cause = "buffers", _BUFFERS
    else:
        return NOTHING
    # Not for buffers: no check of every call compares the statistics of a layer in training.
    who_tells = "" if phase == "buffers" else ' (a wrapper with checks="detail" tells when)'
    since = f"some time before this call{who_tells}"
    return replace(found, phase=phase, since=since, cause=cause)


def attribute_values(
    values: Sequence[object], has_evidence: Sequence[bool] = (), evidence: str = "", ranks: Sequence[int] | None = None
) -> Verdict:
    """The ranks at fault, given the value of each rank, or of each of ``ranks``; see :func:`attribute`."""
    (difference,) = compare_rows([{"": repr(value)} for value in values], ranks).differences
    count = f" ({len(difference.holders[0][1])} of {len(values)} ranks agree)" if difference.suspects else ""
    return attribute(f"{difference.sides}{count}", difference.suspects, has_evidence, evidence)


def attribute(sides: str, minority: Sequence[int], has_evidence: Sequence[bool], evidence: str) -> Verdict:
    """The ranks at fault, from the count of ranks with equal values and from evidence. Phase and cause stay empty.

    ``sides``: the groups of ranks with equal values, as text. ``minority``: the ranks outside the strict majority.
    ``has_evidence``: for each rank, whether ``evidence`` is against it. Evidence against all ranks does not count.
    The text shows a strict majority, and does not say that the majority is right.
    """
    implicated = () if all(has_evidence) else tuple(rank for rank, is_proven in enumerate(has_evidence) if is_proven)
    if not minority and not implicated:
        return Verdict(who=f"a count cannot tell: {sides}, no majority")
    proof = [f"{name_ranks(implicated)}: {evidence}"] if implicated else []
    has_doubt = bool(minority) and not set(implicated) <= set(minority)  # evidence against a rank of the majority
    doubt = ["count and evidence disagree"] if has_doubt else []
    ranks = () if has_doubt else tuple(minority) or implicated
    who = "; ".join([sides, *proof, *doubt])
    return Verdict(who=who, ranks=ranks, minority=tuple(minority), implicated=implicated)


def _format_cause(rule: _Rule, digests: Sequence[StepDigests]) -> str:
    label, describe = rule.detail
    differences = compare_rows([{label: describe(of_rank)} for of_rank in digests]).differences
    detail = differences[0] if differences else f"{label}: the same number on every rank, but different parameters"
    return rule.cause.format(detail=detail)
