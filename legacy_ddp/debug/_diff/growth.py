"""When does a difference of rounding size grow out of it? Norms of one rank are followed until they part."""

from collections.abc import Sequence
from dataclasses import dataclass

from legacy_ddp.debug._diff.pair import Pair
from legacy_ddp.debug._diff.sections import FP32_DIGIT, whole_norm
from legacy_ddp.debug._trace.records import Section

ROUNDING = 1e-5
GROWN = 1e-3
_FOLLOWED = ("reduced_gradients", "parameters")


@dataclass(frozen=True)
class Growth:
    """The first name whose norms part by more than ``GROWN``, or empty; ``last``: the step up to which was looked."""

    last: int
    step: int = 0
    name: str = ""


def follow(pair: Pair, after: int) -> Growth:
    """Look at every step from ``after`` on, until norms part. Costs reading two phases a step."""
    steps = [step for step in pair.steps if step >= after]
    for step in steps:
        for phase in pair.compared(step):
            if phase in _FOLLOWED and (name := _parted(pair, step, phase)):
                return Growth(steps[-1], step, name)
    return Growth(steps[-1] if steps else after)


def _parted(pair: Pair, step: int, phase: str) -> str:
    if pair.a.digest(step, phase) == pair.b.digest(step, phase):
        return ""
    a, b = pair.a.section(step, phase), pair.b.section(step, phase)
    if a is None or b is None:
        return ""
    # Most norms are close, and there are many: who is not is looked at closely.
    ours, theirs = (a.values.norms, b.values.norms) if a.names == b.names else _in_one_order(a, b)
    whole = whole_norm(ours) if phase.endswith("gradients") else 0.0
    for name, norm, other in zip(a.names.names, ours, theirs, strict=True):
        if norm is not None and other is not None and _grown(norm, other, whole):
            return name
    return ""


def _grown(norm: float, other: float, whole: float) -> bool:
    """Whether two norms differ by more than ``GROWN``, and not only beside the norm of all of them."""
    distance = abs(norm - other)
    return distance > GROWN * norm and distance > GROWN * other and distance >= FP32_DIGIT * whole


def _in_one_order(a: Section, b: Section) -> tuple[Sequence[float | None], Sequence[float | None]]:
    return a.values.norms, [b.norms.get(name) for name in a.names.names]
