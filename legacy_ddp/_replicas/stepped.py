"""The optimizers that stepped since the last call."""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from legacy_ddp._replicas import state


class SteppedOptimizers:
    """The optimizers that made a step since the last call, with the hyperparameters of their last step, and whether
    they had any state before.

    A scheduler may have made the present hyperparameters equal again, and the step has given state to an optimizer
    that had lost its state. Keeps no optimizer alive.
    """

    def __init__(self) -> None:
        self._stepped: list[weakref.ref[torch.optim.Optimizer]] = []
        self._groups: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Mapping[str, Any]]]
        self._groups = weakref.WeakKeyDictionary()
        self._had_state: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the begin of a step."""
        self._had_state[optimizer] = any(optimizer.state.values())  # a parameter may have an empty state

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the end of a step."""
        # Copied and not yet described: an optimizer may have hundreds of parameter groups.
        self._groups[optimizer] = [
            {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in optimizer.param_groups
        ]
        if not any(reference() is optimizer for reference in self._stepped):
            self._stepped.append(weakref.ref(optimizer))

    def clear(self) -> None:
        """Begin with the steps after a call."""
        self._stepped.clear()

    @property
    def alive(self) -> list[torch.optim.Optimizer]:
        """The optimizers, in the order of their first steps."""
        return [optimizer for reference in self._stepped if (optimizer := reference()) is not None]

    def settings_of(self, optimizer: torch.optim.Optimizer) -> Iterator[state.Fact]:
        """The hyperparameters as of the last step, and whether there was state before it."""
        yield from state.settings_in(self._groups[optimizer])
        yield state.EARLIER_STATE, "some" if self._had_state.get(optimizer) else state.NONE
