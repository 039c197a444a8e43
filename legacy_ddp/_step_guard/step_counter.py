"""The number of optimizer steps between two calls."""

import weakref
from collections.abc import Sequence

import torch

from legacy_ddp._step_guard.policy import StepPolicy
from legacy_ddp._step_guard.step_observer import StepObserver

_QUICK_NUMEL = 2**16  # gradients of at most this size are read first


class StepCounter(StepObserver):
    """Counts completed steps with a nonzero gradient of the given parameters, from a successful call to the next call.

    A step with zeros alone changes no replica by itself: tools make such steps to create optimizer state. Gradients on
    other devices than the CPU are not read, because the step would wait for the device.
    """

    def __init__(self, policy: StepPolicy) -> None:
        super().__init__(policy)
        # Of the call from which on steps are counted. Weak: a destroyed group must not live on here.
        self._place: weakref.ref[object] | None = None
        self._steps = 0

    def take(self, place: object) -> int | None:
        """The number of steps since the last call, or None if the number is unknown, and stop counting.

        The number is known if the last call succeeded, and was made at the same ``place``, a process group.
        """
        is_known = self._place is not None and self._place() is place
        self._place = None
        self.forget_failed_step()
        return self._steps if is_known else None

    def stop(self) -> None:
        """Count no steps until the next successful call."""
        self._place = None

    def begin(self, place: object, parameters: Sequence[torch.Tensor]) -> None:
        """Count from now on, after a successful call."""
        self._place, self._steps = weakref.ref(place), 0
        self.ids = frozenset(map(id, parameters))

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step."""
        if self._place is not None and self._used_gradients(optimizer):
            self._steps += 1

    def _used_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a gradient of the parameters is not zero. Small gradients first: the first is mostly enough.

        Large gradients are read in pieces, because ``any()`` copies its input as booleans.
        """
        large = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None or id(parameter) not in self.ids or grad.device.type != "cpu":
                    continue
                if grad.is_sparse:
                    grad = grad.coalesce().values()
                if grad.numel() > _QUICK_NUMEL:
                    large.append(grad)
                elif _is_nonzero(grad):
                    return True
        return any(
            _is_nonzero(piece)
            for grad in large
            for piece in grad.split(max(1, len(grad) * _QUICK_NUMEL // grad.numel()))
        )


def _is_nonzero(grad: torch.Tensor) -> bool:
    """Whether any element is not zero. The norm is much quicker than ``any()``, but may underflow."""
    return bool(torch.linalg.vector_norm(grad)) or bool(grad.any())
