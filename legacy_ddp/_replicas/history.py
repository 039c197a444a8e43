"""Digests of one rank at each phase since its last call."""

import weakref
from functools import cache
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.inventory import distinct, fingerprint
from legacy_ddp._replicas import state
from legacy_ddp._replicas.digest import digest_all
from legacy_ddp._replicas.membership import describe_membership
from legacy_ddp._replicas.state_history import StateHistory
from legacy_ddp._replicas.step_digests import StepDigests
from legacy_ddp._settings import Settings
from legacy_ddp._step_guard.policy import StepPolicy


class StepHistory:
    """Takes the digests of a wrapper: in its calls, and around every step of an optimizer that holds its parameters."""

    def __init__(self, wrapper: nn.Module, settings: Settings, policy: StepPolicy) -> None:
        self.digests = StepDigests()
        self._wrapper = weakref.ref(wrapper)
        self._settings = settings
        self._policy = policy
        self._signature: list[tuple[str, int]] = []
        self._parameters: list[torch.Tensor] = []
        self._ids: frozenset[int] = frozenset()
        # From the second optimizer on, a step digests only the parameters of its optimizer: a hundred optimizers then
        # cost no more than a single optimizer.
        self._first_optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._has_several = False
        self._parameters_after_step = 0  # unknown with several optimizers
        # Changes before and after the steps that recur: a rank that clamps its weights after every step, for example.
        self._recurring = (False, False)
        # Hyperparameters at the last step: a scheduler may have made them equal again.
        self._settings_used: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[state.Fact]] = (
            weakref.WeakKeyDictionary()
        )
        self._stepped: list[weakref.ref[torch.optim.Optimizer]] = []  # since the last call
        self._was_changed_at_step = self._is_changed = False  # before a step since the last call; now
        self._state_history = StateHistory()
        # The step that has begun and not ended, and its digests of parameters and gradients at the start. Steps inside
        # this step, as a sharded optimizer makes them, are ignored.
        self._open: weakref.ref[torch.optim.Optimizer] | None = None
        self._at_step = (0, 0)
        _histories.add(self)
        _register_step_hooks()

    def update_digest(self) -> int:
        """Digest parameters and buffers now; return one digest of all phases."""
        if self._at_step != (0, 0):  # a closure does not make this call: the open step raised an error
            self._open = None
        self._find_parameters()
        self.digests.parameters = digest_all(self._parameters)
        buffers = [item.value for item in self._buffers()]
        self.digests.buffers = digest_all([value for value in buffers if isinstance(value, torch.Tensor)])
        self._is_changed = self._has_changed(self.digests.parameters)
        return self.digests.digest

    def end_call(self) -> None:
        """Begin new digests with the gradients of a successful call."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.requires_grad]
        self._recurring = self._was_changed_at_step, self._is_changed
        self._was_changed_at_step = False
        self.digests = StepDigests(parameters_at_call=self.digests.parameters, gradients_at_call=digest_all(gradients))
        self._stepped.clear()
        self._state_history.end_call()

    def restart(self) -> None:
        """Discard all digests, after a broadcast of parameters or a report of the difference."""
        self.digests = StepDigests()
        self._was_changed_at_step = self._is_changed = False
        self._state_history.restart()

    def snapshot(self) -> StepDigests:
        """The digests, with the evidence of this rank, as of the last :meth:`update_digest`."""
        digests = self.digests
        digests.changed_before = self._was_changed_at_step and not self._recurring[0]
        digests.changed_after = self._is_changed and not self._recurring[1]
        digests.state_changed_before, digests.state_changed_after = self._state_history.snapshot()
        named = distinct(self._module.named_parameters(remove_duplicate=False))
        digests.membership_text, digests.has_stale_parameter = describe_membership(self._stepped_optimizers(), named)
        return digests

    def items(self) -> list[state.StateItem]:
        """The items to compare if the digests differ."""
        return [
            *state.parameters(self._module, self._settings.ignore),
            *self._buffers(),
            *state.optimizer_items(self._stepped_optimizers(), self._module, self._settings_used.__getitem__),
        ]

    def covers(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` steps any parameter seen in the last call. False in ``no_sync()``: steps are local."""
        return self._policy.sync_enabled and any(
            id(parameter) in self._ids for group in optimizer.param_groups for parameter in group["params"]
        )

    def begin_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Digest parameters and gradients before a step. A closure computes the gradients later: nothing to digest."""
        if self._open is not None and self._open() is not optimizer:
            return
        self._open = weakref.ref(optimizer)
        self._count_optimizer(optimizer)
        self._state_history.begin_step(optimizer)
        # Includes the gradient of a frozen parameter: a call does not reduce the gradient, but a step uses it.
        grads = [parameter.grad for parameter in self._parameters_of(optimizer)]
        self._at_step = (0, 0) if has_closure else (self._digest_parameters(optimizer), digest_all(grads))

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the digests before and after the step. A step that raised changed nothing and is not recorded."""
        if self._open is None or self._open() is not optimizer:
            return
        self._open = None
        digests, (parameters, gradients) = self.digests, self._at_step
        self._was_changed_at_step |= parameters != 0 and self._has_changed(parameters)
        self._parameters_after_step = self._digest_parameters(optimizer)
        self._state_history.end_step(optimizer)
        if not any(reference() is optimizer for reference in self._stepped):
            self._stepped.append(weakref.ref(optimizer))
            # Only the first step of an optimizer: its next step begins with the result of this step.
            digests.parameters_at_step = _add(digests.parameters_at_step, parameters)
        self._settings_used[optimizer] = [
            (name, value.clone() if isinstance(value, torch.Tensor) else value)
            for name, value in state.settings(optimizer)
        ]
        digests.membership = _add(digests.membership, fingerprint(self._mask_of(optimizer)))
        digests.gradients_at_step = _add(digests.gradients_at_step, gradients)
        digests.parameters_after_step = _add(digests.parameters_after_step, self._parameters_after_step)
        digests.steps += 1

    def count_other_step(self) -> None:
        """Count a step of an optimizer without these parameters: of another model, or of replaced parameters."""
        if self._open is None and self._policy.sync_enabled:
            self.digests.other_steps += 1

    @property
    def _module(self) -> nn.Module:
        wrapper: Any = self._wrapper()
        module: nn.Module = wrapper.module  # the user may have assigned a new module since the last call
        return module

    def _stepped_optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for reference in self._stepped if (optimizer := reference()) is not None]

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The parameters of the wrapper that the optimizer holds, sorted by name."""
        return list(compress(self._parameters, self._mask_of(optimizer)))

    def _mask_of(self, optimizer: torch.optim.Optimizer) -> bytes:
        """One byte for each parameter, sorted by name: whether the optimizer holds the parameter."""
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return bytes(id(parameter) in ids for parameter in self._parameters)

    def _digest_parameters(self, optimizer: torch.optim.Optimizer) -> int:
        return digest_all(self._parameters_of(optimizer) if self._has_several else self._parameters)

    def _count_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note whether there are several optimizers, once and for all: garbage collection must not part the ranks."""
        if self._first_optimizer is None:
            self._first_optimizer = weakref.ref(optimizer)
        elif not self._has_several and self._first_optimizer() is not optimizer:
            self._has_several = True

    def _has_changed(self, digest: int) -> bool:
        """Whether parameters with this digest differ from the result of the last step, or of the last call."""
        digests = self.digests
        expected = self._parameters_after_step if digests.steps else digests.parameters_at_call
        return digests.parameters_at_call != 0 and not self._has_several and digest != expected

    def _find_parameters(self) -> None:
        """Sort the parameters by name, as every rank does. Most of the time they are unchanged since the last call."""
        named = list(self._module.named_parameters(remove_duplicate=False))
        signature = [(name, id(parameter)) for name, parameter in named]
        if signature != self._signature:
            self._signature = signature
            self._parameters = [item.tensor for item in distinct(named, self._settings.ignore)]
            self._ids = frozenset(map(id, self._parameters))

    def _buffers(self) -> list[state.StateItem]:
        return state.buffers(self._module, self._settings.ignore, self._settings.checks.local_buffers)


def _add(total: int, digest: int) -> int:
    """The sum mod 2**64, which does not depend on the order in which a rank steps its optimizers."""
    return (total + digest) % 2**64


_histories: "weakref.WeakSet[StepHistory]" = weakref.WeakSet()


@cache
def _register_step_hooks() -> None:
    internals.before_every_step(_begin_step)  # after the pre-hooks of the optimizer: a pre-hook may make the call
    register_optimizer_step_post_hook(_after_step)


@internals.disable_dynamo
def _begin_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    has_closure = any(callable(argument) for argument in (*args[1:], *kwargs.values()))
    with torch.no_grad():
        for history in list(_histories):
            if history.covers(optimizer):
                history.begin_step(optimizer, has_closure=has_closure)


@internals.disable_dynamo
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for history in list(_histories):
            if history.covers(optimizer):
                history.end_step(optimizer)
            else:
                history.count_other_step()
