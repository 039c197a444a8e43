"""The record of one rank since its last call: what ranks compare, and evidence of this rank alone."""

from dataclasses import dataclass

from legacy_ddp._buckets.inventory import fingerprint


@dataclass
class Phases:
    """Words (see :func:`digest_all`) in the order in which they come about; 0 for what did not happen.

    ``before``: parameters at the last call. ``reduced``: gradients as that call left them. ``steps``: the number of
    steps since then. ``held``: which parameters their optimizers hold. ``found``, ``used``: parameters and gradients as
    the steps found them, ``stepped``: parameters as they left them. These four sum up all steps. ``parameters``,
    ``buffers``: now.

    Evidence, which each rank has of itself alone: ``changed_before``: parameters changed between the call, or the step
    before, and a step. ``changed_after``: between the last step, or the call, and now. ``state_changed_before``,
    ``state_changed_after``: likewise the optimizers' state, since the step before. None of the four counts if that is a
    habit. ``lost_parameter``: an optimizer holds a tensor that is not in the model, in place of a parameter.

    ``holds``: in words, what the optimizers hold. ``other_steps``: steps of optimizers without any of the parameters.
    """

    before: int = 0
    reduced: int = 0
    steps: int = 0
    held: int = 0
    found: int = 0
    used: int = 0
    stepped: int = 0
    parameters: int = 0
    buffers: int = 0
    changed_before: bool = False
    changed_after: bool = False
    state_changed_before: bool = False
    state_changed_after: bool = False
    lost_parameter: bool = False
    holds: str = ""
    other_steps: int = 0

    @property
    def word(self) -> int:
        """One number for what replicas have in common."""
        words = (self.before, self.reduced, self.steps, self.held, self.found, self.used, self.stepped)
        return fingerprint(repr((*words, self.parameters, self.buffers)).encode())
