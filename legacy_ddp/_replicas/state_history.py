"""Changes of optimizer state outside of steps, found by one rank alone."""

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch

from legacy_ddp._replicas.digest import checksum
from legacy_ddp._replicas.state import comparable


class StateHistory:
    """Compares the state after a step with the state before the next step. Local."""

    def __init__(self) -> None:
        self._after_step: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._was_changed = self._is_recurring = False

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._was_changed |= self._has_changed(optimizer)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._after_step[optimizer] = _checksum_of(optimizer)

    def end_call(self) -> None:
        """Separate the steps after a successful call from the steps before it."""
        self._is_recurring, self._was_changed = self._was_changed, False

    def restart(self) -> None:
        """Discard the evidence, so that a repair of the state is not evidence."""
        self._after_step.clear()
        self._was_changed = False

    def snapshot(self) -> tuple[bool, bool]:
        """Whether state changed outside of a step: before a step since the last call, and since the last step."""
        if self._is_recurring:
            return False, False
        return self._was_changed, any(self._has_changed(optimizer) for optimizer in list(self._after_step))

    def _has_changed(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer in self._after_step and self._after_step[optimizer] != _checksum_of(optimizer)


def _checksum_of(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() if isinstance(state, Mapping) for value in state.values()]
    # A subclass may not have bytes of its own and is not checked.
    return checksum([value for value in values if type(value) is torch.Tensor and comparable(value) is value])
