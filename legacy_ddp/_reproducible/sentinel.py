"""Zeros in place of one gradient, which show whether the user cleared the gradients after they were removed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from legacy_ddp._buckets.plan import Plan


@dataclass(frozen=True)
class ZeroGradSentinel:
    """``zeros`` take the place of ``parameter.grad``, the gradient of slot ``index``.

    The zeros are -0.0. Scaling and clipping keep -0.0, ``zero_grad()`` leaves 0.0 or None, and backward adds to -0.0
    without changing a bit of the new gradient.
    """

    index: int
    parameter: torch.Tensor
    zeros: torch.Tensor
    version: int

    def is_alone(self, *, is_added_to: bool) -> bool:
        """Whether ``.grad`` is the sentinel without an added gradient. ``is_added_to``: backward ran since.

        After a backward any write was the addition. Otherwise a write that left -0.0 was clipping or scaling.
        """
        if self.parameter.grad is not self.zeros:
            return False
        return self.zeros._version == self.version or (not is_added_to and self._is_negative_zero)

    def was_cleared(self, *, is_added_to: bool) -> bool:
        """Whether ``zero_grad()`` was called since. After a backward only a ``.grad`` of None shows the call."""
        grad = self.parameter.grad
        if grad is None:
            return True
        if is_added_to or grad is not self.zeros:  # or the user assigned a gradient by hand
            return False
        real = torch.view_as_real(grad) if grad.is_complex() else grad
        return not bool((torch.signbit(real) | (real != 0)).any())

    def remove(self) -> None:
        """Clear ``.grad`` if the sentinel is still there, unchanged."""
        if self.is_alone(is_added_to=False):
            self.parameter.grad = None

    @property
    def _is_negative_zero(self) -> bool:
        real = torch.view_as_real(self.zeros) if self.zeros.is_complex() else self.zeros
        return bool((torch.signbit(real) & (real == 0)).all())


def place_sentinel(plan: Plan) -> ZeroGradSentinel | None:
    """Put a sentinel in place of the smallest gradient. Returns None if no parameter has elements."""
    slots = plan.layout.slots
    index = min((i for i, slot in enumerate(slots) if slot.numel), key=lambda i: slots[i].numel, default=None)
    if index is None:
        return None
    parameter, dtype = plan.parameters[index], plan.bucket_of(index).dtype
    zeros = -torch.zeros(slots[index].shape, dtype=dtype, device=parameter.device)
    parameter.grad = zeros
    return ZeroGradSentinel(index, parameter, zeros, zeros._version)


def without_sentinel(
    grads: Sequence[torch.Tensor | None], sentinel: ZeroGradSentinel | None, *, is_added_to: bool
) -> list[torch.Tensor | None]:
    """``grads``, one per slot, with None in place of a sentinel without an added gradient."""
    if sentinel is None or not sentinel.is_alone(is_added_to=is_added_to):
        return list(grads)
    return [None if index == sentinel.index else grad for index, grad in enumerate(grads)]
