"""The checks of a call, in the order in which they are asked."""

from legacy_ddp._collectives.check import Check, CheckList, Subject
from legacy_ddp._collectives.edited import EditedGradients
from legacy_ddp._collectives.equal_steps import EqualSteps
from legacy_ddp._collectives.nonfinite import NonFiniteGradients
from legacy_ddp._collectives.replicas import Replicas
from legacy_ddp._collectives.warn_once import MergedMicroBatches, SameData, UnclearedGradients, UnevenWork

CHECKS: tuple[type[Check], ...] = (
    EqualSteps,
    Replicas,
    EditedGradients,
    NonFiniteGradients,
    UnevenWork,
    SameData,
    UnclearedGradients,
    MergedMicroBatches,
)


def make_checks(subject: Subject) -> CheckList:
    """An object of every check."""
    return CheckList([kind(subject) for kind in CHECKS])
