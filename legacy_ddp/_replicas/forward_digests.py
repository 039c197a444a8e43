"""Digests taken in a forward pass for the next call: the common part of digests in turns and in every Nth call."""

import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from legacy_ddp._replicas import state
from legacy_ddp._replicas.membership import parameter_groups
from legacy_ddp._replicas.shared_buffers import SharedBuffers
from legacy_ddp._replicas.stepped import SteppedOptimizers
from legacy_ddp._settings import Settings
from legacy_ddp._step_guard.backward_counter import StepPolicy
from legacy_ddp._step_guard.step_counter import StepObserver


class ForwardDigests(StepObserver):
    """Takes a digest in the first training forward since the last call, if the next call compares replicas.

    Later, a loop may hold other weights for a moment (sharpness-aware minimisation). Subclasses choose the calls and
    the tensors.
    """

    def __init__(self, wrapper: nn.Module, settings: Settings, policy: StepPolicy) -> None:
        super().__init__(policy)
        self.buffers = SharedBuffers(settings)
        self.optimizers = SteppedOptimizers()
        self._wrapper = weakref.ref(wrapper)
        self._settings = settings
        self._next_call = 1
        self._taken: tuple[int, int] | None = None  # the number of the coming call, and the digest for it

    def begin_forward(self, *, is_training: bool) -> None:
        """Take the digest for the next call, in the first training forward since the last call."""
        # A forward may run where bits cannot be read (fake tensors, function transforms): the call reads them.
        with suppress(Exception), torch.no_grad():
            self.buffers.begin_forward(self._module)
            if is_training and self._taken is None and self._is_due(self._next_call):
                self._taken = self._next_call, self._digest(self._next_call)

    def restart(self) -> None:
        """Discard the digest, after a broadcast of parameters."""
        self._taken = None

    def begin_step(self, optimizer: torch.optim.Optimizer, **_: bool) -> None:
        """Note whether the optimizer has state."""
        self.optimizers.begin(optimizer)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the optimizer for a report. The next forward has other weights than a forward before the step."""
        self.optimizers.add(optimizer)
        self._taken = None

    def _is_due(self, number: int) -> bool:
        """Whether call ``number`` compares replicas."""
        raise NotImplementedError

    def _digest(self, number: int) -> int:
        """The digest for call ``number``."""
        raise NotImplementedError

    @property
    def _module(self) -> nn.Module:
        wrapper: Any = self._wrapper()
        module: nn.Module = wrapper.module  # the user may have assigned a new module since the last call
        return module

    def _shared(self) -> list[state.StateItem]:
        """All parameters and shared buffers."""
        module = self._module
        return [*state.parameters(module, self._settings.ignore), *self.buffers.items(module)]

    def _items(self) -> Iterator[state.StateItem]:
        """All that a report compares."""
        module, optimizers = self._module, self.optimizers.alive
        yield from self._shared()
        yield from state.optimizer_items(optimizers, module, self.optimizers.settings_of)
        yield from parameter_groups(optimizers, module, self._settings.ignore)
