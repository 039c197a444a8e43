"""Digests of one rank at the phases since the last call, and the evidence of this rank alone."""

from dataclasses import dataclass

from legacy_ddp._buckets.layout import fingerprint


@dataclass
class StepDigests:
    """Digests (see :func:`digest_all`) in the order of the phases; 0 for a phase that did not happen.

    ``parameters_at_call``, ``gradients_at_call``: as the last call left them. ``steps``: the number of steps since
    then. ``membership``: the parameters that the stepped optimizers hold. ``parameters_at_step``,
    ``gradients_at_step``: as the steps found them. ``parameters_after_step``: as the steps left them. These four are
    sums over all steps. ``parameters``, ``buffers``: now.

    The other fields are not in the common digest. ``changed_before``: parameters changed between the call, or the
    previous step, and a step. ``changed_after``: parameters changed between the last step, or the call, and now.
    ``state_changed_before``, ``state_changed_after``: the same for optimizer state, since the previous step. A change
    that recurs at every step is not evidence and leaves these four False. ``has_stale_parameter``: an optimizer holds
    a tensor that is not in the model, in place of a parameter. ``membership_text``: the contents of the optimizers.
    ``other_steps``: steps of optimizers without any parameter of the model.
    """

    parameters_at_call: int = 0
    gradients_at_call: int = 0
    steps: int = 0
    membership: int = 0
    parameters_at_step: int = 0
    gradients_at_step: int = 0
    parameters_after_step: int = 0
    parameters: int = 0
    buffers: int = 0
    changed_before: bool = False
    changed_after: bool = False
    state_changed_before: bool = False
    state_changed_after: bool = False
    has_stale_parameter: bool = False
    membership_text: str = ""
    other_steps: int = 0

    @property
    def digest(self) -> int:
        """One digest of everything that replicas share."""
        at_call = (self.parameters_at_call, self.gradients_at_call)
        of_steps = (self.steps, self.membership, self.parameters_at_step, self.gradients_at_step)
        after_steps = (self.parameters_after_step, self.parameters, self.buffers)
        return fingerprint(repr((*at_call, *of_steps, *after_steps)).encode())
