"""Changes of optimizer state outside of steps, as one rank finds them on its own."""

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch

from legacy_ddp._replicas.digest import sum_all
from legacy_ddp._replicas.state import comparable


class StateTrail:
    """Compares the state that a step left with the state that the next step finds. Local."""

    def __init__(self) -> None:
        self._left: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._was_changed = self._is_habit = False

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._was_changed |= self._has_changed(optimizer)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._left[optimizer] = _word_of(optimizer)

    def begin_anew(self) -> None:
        """A call succeeded: what follows it is told apart from what was before."""
        self._is_habit, self._was_changed = self._was_changed, False

    def forget(self) -> None:
        """State that is mended from now on is no evidence."""
        self._left.clear()
        self._was_changed = False

    def recall(self) -> tuple[bool, bool]:
        """Whether state changed outside of a step: before a step since the last call, and since the last step."""
        if self._is_habit:
            return False, False
        return self._was_changed, any(self._has_changed(optimizer) for optimizer in list(self._left))

    def _has_changed(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer in self._left and self._left[optimizer] != _word_of(optimizer)


def _word_of(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() if isinstance(state, Mapping) for value in state.values()]
    # A subclass may not have bytes of its own: of those nothing is known.
    return sum_all([value for value in values if type(value) is torch.Tensor and comparable(value) is value])
