"""Growth of a difference of rounding size: the step at which the norms of one rank differ by more than rounding."""

from dataclasses import dataclass

from legacy_ddp.debug._diff.pair import Pair
from legacy_ddp.debug._diff.sections import FP32_DIGIT, total_norm

ROUNDING_LIMIT = 1e-5
GROWTH_LIMIT = 1e-3
_FOLLOWED_PHASES = ("reduced_gradients", "parameters")


@dataclass(frozen=True)
class Growth:
    """The first name with norms more than ``GROWTH_LIMIT`` apart, empty without any; ``last``: the last step read."""

    last: int
    step: int = 0
    name: str = ""


def find_growth(pair: Pair, first: int) -> Growth:
    """Compare norms from step ``first`` on, until a difference has grown. Reads two phases per step."""
    steps = [step for step in pair.steps if step >= first]
    for step in steps:
        for phase in pair.compared_phases(step):
            if phase in _FOLLOWED_PHASES and (name := _grown_name(pair, step, phase)):
                return Growth(steps[-1], step, name)
    return Growth(steps[-1] if steps else first)


def _grown_name(pair: Pair, step: int, phase: str) -> str:
    if pair.a.digest(step, phase) == pair.b.digest(step, phase):
        return ""
    a, b = pair.a.section(step, phase), pair.b.section(step, phase)
    if a is None or b is None:
        return ""
    # Dictionaries only where names differ: a section may hold thousands of norms.
    norms_b = b.values.norms if a.names == b.names else [b.norms.get(name) for name in a.names.names]
    total = total_norm(a.values.norms) if phase.endswith("gradients") else 0.0
    for name, left, right in zip(a.names.names, a.values.norms, norms_b, strict=True):
        if left is not None and right is not None and _has_grown(left, right, total):
            return name
    return ""


def _has_grown(a: float, b: float, total: float) -> bool:
    """Whether two norms differ by more than ``GROWTH_LIMIT``, and by more than the rounding of ``total``."""
    distance = abs(a - b)
    return distance > GROWTH_LIMIT * a and distance > GROWTH_LIMIT * b and distance >= FP32_DIGIT * total
