"""Digests of the whole replica in every Nth call. The check of ``Checks("detail", every=N)``."""

import weakref
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from legacy_ddp._replicas import state
from legacy_ddp._replicas.compare import compare_items
from legacy_ddp._replicas.membership import parameter_groups
from legacy_ddp._replicas.report import ReplicaReport
from legacy_ddp._replicas.rotation import with_evidence
from legacy_ddp._replicas.shared_buffers import SharedBuffers
from legacy_ddp._replicas.stepped import SteppedOptimizers
from legacy_ddp._settings import Settings
from legacy_ddp._step_guard.policy import StepPolicy
from legacy_ddp._step_guard.step_observer import StepObserver
from legacy_ddp._transport.call import Call
from legacy_ddp._transport.groups import Groups


class PeriodicDigests(StepObserver):
    """Digests parameters and shared buffers for call 1, N + 1, 2 N + 1, ..., and nothing for the calls between.

    As in every call at level ``"detail"``, parameters are digested in the first training forward since the last call.
    """

    def __init__(self, wrapper: nn.Module, settings: Settings, policy: StepPolicy) -> None:
        super().__init__(policy)
        self.buffers = SharedBuffers(settings)
        self.optimizers = SteppedOptimizers()
        self._wrapper = weakref.ref(wrapper)
        self._settings = settings
        self._next_call = 1
        self._taken: tuple[int, int] | None = None  # the number of the coming call, and the digest for it
        self._agreed: weakref.WeakKeyDictionary[Groups, int] = weakref.WeakKeyDictionary()  # the last call that agreed

    def begin_forward(self) -> None:
        """Take the digest for the next call, in the first training forward since the last call."""
        self.buffers.has_run = True
        if self._taken is None and self._is_due(self._next_call):
            # A forward may run where bits cannot be read (fake tensors, function transforms): the call reads them.
            with suppress(Exception), torch.no_grad():
                self._taken = self._next_call, state.digest_items(self._shared())

    def digest_of(self, call: Call) -> int | None:
        """The digest for ``call``; None for a call between."""
        self.forget_failed_step()
        if not self._is_due(call.number):
            return None
        with call.phase("digest"):
            self.ids = frozenset(map(id, self._module.parameters()))
            if self._taken is None or self._taken[0] != call.number:
                self._taken = call.number, state.digest_items(self._shared())
            return self._taken[1]

    def compare(self, call: Call, left_out: Collection[int], *, is_equal: bool) -> ReplicaReport | None:
        """The report if replicas differ. ``is_equal``: whether the digests of this call are equal on all ranks.

        Collective after a difference.
        """
        last = self._agreed.get(call.groups, 0)
        if is_equal:
            self._agreed[call.groups] = call.number
            return None
        self._taken = None
        with call.phase("compare"):
            self.buffers.learn(call, self._module, left_out)
        report = compare_items(call, list(self._items()), None, left_out=left_out)
        # Optimizers may differ by design (sharded state); a digest may belong to a moment that has passed.
        if not any(item.kind in ("parameters", "buffers") for item in report.differences):
            return None
        return with_evidence(call, report, last)

    def end_call(self, call: Call) -> None:
        """Begin with the time after a successful call."""
        self._taken, self._next_call = None, call.number + 1
        if self._is_due(call.number):
            self.optimizers.clear()

    def restart(self) -> None:
        """Discard the digest, after a broadcast of parameters."""
        self._taken = None

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the optimizer for a report. The next forward has other weights than a forward before the step."""
        self.optimizers.add(optimizer)
        self._taken = None

    @property
    def _module(self) -> nn.Module:
        wrapper: Any = self._wrapper()
        module: nn.Module = wrapper.module  # the user may have assigned a new module since the last call
        return module

    def _is_due(self, number: int) -> bool:
        return (number - 1) % self._settings.checks.every == 0

    def _shared(self) -> list[state.StateItem]:
        module = self._module
        return [*state.parameters(module, self._settings.ignore), *self.buffers.items(module)]

    def _items(self) -> Iterator[state.StateItem]:
        module, ignore, optimizers = self._module, self._settings.ignore, self.optimizers.alive
        yield from self._shared()
        yield from state.optimizer_items(optimizers, module, self.optimizers.settings_of)
        yield from parameter_groups(optimizers, module, ignore)
