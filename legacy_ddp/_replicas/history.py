"""Which bits did this rank have at each phase since its last call? The local half of "since when"."""

import weakref
from functools import cache
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.inventory import distinct, fingerprint
from legacy_ddp._replicas import state as hold
from legacy_ddp._replicas.digest import digest_all
from legacy_ddp._replicas.membership import describe_members
from legacy_ddp._replicas.phases import Phases
from legacy_ddp._replicas.state_trail import StateTrail
from legacy_ddp._settings import Settings
from legacy_ddp._step_guard.policy import StepPolicy


class Trail:
    """Takes the words of one wrapper: in its calls, and around every step of an optimizer that holds its parameters."""

    def __init__(self, wrapper: nn.Module, settings: Settings, policy: StepPolicy) -> None:
        self.phases = Phases()
        self._wrapper = weakref.ref(wrapper)
        self._settings = settings
        self._policy = policy
        self._signature: list[tuple[str, int]] = []
        self._parameters: list[torch.Tensor] = []
        self._ids: frozenset[int] = frozenset()
        # From the second optimizer on, words of a step are those of its own parameters: many cost no more than one.
        self._first_optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._has_several = False
        self._left = 0  # parameters as the last step left them; unknown with several optimizers
        # Who writes to weights after every step (clamps them, say) proves nothing by doing it once more.
        self._habits = (False, False)
        # Hyperparameters at the last step: a scheduler may have made them alike again.
        self._settings_used: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[hold.Fact]] = (
            weakref.WeakKeyDictionary()
        )
        self._stepped_since: list[weakref.ref[torch.optim.Optimizer]] = []  # the last call
        self._was_found_changed = self._is_changed = False  # by a step since the last call; now
        self._states = StateTrail()
        # The step that has begun and not ended, and what it found (parameters, gradients). Steps inside it, such as a
        # sharded optimizer makes, are its own affair.
        self._open: weakref.ref[torch.optim.Optimizer] | None = None
        self._found = (0, 0)
        _trails.add(self)
        _follow_steps()

    def sign(self) -> int:
        """Look at parameters and buffers now; return one number for all phases."""
        if self._found != (0, 0):  # no closure makes this call: a step that raised is over
            self._open = None
        self._find_parameters()
        self.phases.parameters = digest_all(self._parameters)
        buffers = [item.value for item in self._buffers()]
        self.phases.buffers = digest_all([value for value in buffers if isinstance(value, torch.Tensor)])
        self._is_changed = self._has_changed(self.phases.parameters)
        return self.phases.word

    def note_reduced(self) -> None:
        """Begin anew with the gradients that a call left."""
        reduced = [parameter.grad for parameter in self._parameters if parameter.requires_grad]
        self._habits = self._was_found_changed, self._is_changed
        self._was_found_changed = False
        self.phases = Phases(before=self.phases.parameters, reduced=digest_all(reduced))
        self._stepped_since.clear()
        self._states.begin_anew()

    def restart(self) -> None:
        """Forget what was: parameters were given to all ranks, or what differs was told."""
        self.phases = Phases()
        self._was_found_changed = self._is_changed = False
        self._states.forget()

    def recall(self) -> Phases:
        """The phases, with what only this rank can tell, as of the last :meth:`sign`."""
        phases = self.phases
        phases.changed_before = self._was_found_changed and not self._habits[0]
        phases.changed_after = self._is_changed and not self._habits[1]
        phases.state_changed_before, phases.state_changed_after = self._states.recall()
        named = distinct(self._module.named_parameters(remove_duplicate=False))
        phases.holds, phases.lost_parameter = describe_members(self._stepped_since_call(), named)
        return phases

    def holdings(self) -> list[hold.Holding]:
        """What to compare one by one if the numbers differ."""
        return [
            *hold.parameters(self._module, self._settings.ignore),
            *self._buffers(),
            *hold.optimizers(self._stepped_since_call(), self._module, self._settings_used.__getitem__),
        ]

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` steps any of the parameters seen in the last call; a step in ``no_sync()`` is local."""
        return self._policy.sync_enabled and any(
            id(parameter) in self._ids for group in optimizer.param_groups for parameter in group["params"]
        )

    def begin_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Look at what a step finds; with a closure that is what the closure will make, after a call of its own."""
        if self._open is not None and self._open() is not optimizer:
            return
        self._open = weakref.ref(optimizer)
        self._count(optimizer)
        self._states.begin_step(optimizer)
        # Gradients also of a frozen parameter, which no call reduces: a step follows it.
        grads = [parameter.grad for parameter in self._mine(optimizer)]
        self._found = (0, 0) if has_closure else (self._word_of(optimizer), digest_all(grads))

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what it found and left; a step that raised has done nothing and is not noted."""
        if self._open is None or self._open() is not optimizer:
            return
        self._open = None
        phases, (found, used) = self.phases, self._found
        self._was_found_changed |= found != 0 and self._has_changed(found)
        self._left = self._word_of(optimizer)
        self._states.end_step(optimizer)
        if not any(reference() is optimizer for reference in self._stepped_since):
            self._stepped_since.append(weakref.ref(optimizer))
            phases.found = _add(phases.found, found)  # what its next step finds follows from this one
        self._settings_used[optimizer] = [
            (name, value.clone() if isinstance(value, torch.Tensor) else value)
            for name, value in hold.settings(optimizer)
        ]
        phases.held = _add(phases.held, fingerprint(self._mask_of(optimizer)))
        phases.used = _add(phases.used, used)
        phases.stepped = _add(phases.stepped, self._left)
        phases.steps += 1

    def note_other_step(self) -> None:
        """A step of an optimizer that holds none of the parameters: of another model, or of what replaced these."""
        if self._open is None and self._policy.sync_enabled:
            self.phases.other_steps += 1

    @property
    def _module(self) -> nn.Module:
        wrapper: Any = self._wrapper()
        module: nn.Module = wrapper.module  # which may be another one than in the last call
        return module

    def _stepped_since_call(self) -> list[torch.optim.Optimizer]:
        return [optimizer for reference in self._stepped_since if (optimizer := reference()) is not None]

    def _mine(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The parameters that both know, sorted by name."""
        return list(compress(self._parameters, self._mask_of(optimizer)))

    def _mask_of(self, optimizer: torch.optim.Optimizer) -> bytes:
        """One byte for each parameter, sorted by name: whether the optimizer holds it."""
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return bytes(id(parameter) in ids for parameter in self._parameters)

    def _word_of(self, optimizer: torch.optim.Optimizer) -> int:
        return digest_all(self._mine(optimizer) if self._has_several else self._parameters)

    def _count(self, optimizer: torch.optim.Optimizer) -> None:
        """Whether there are several is decided once, and not by what was collected meanwhile: ranks must agree."""
        if self._first_optimizer is None:
            self._first_optimizer = weakref.ref(optimizer)
        elif not self._has_several and self._first_optimizer() is not optimizer:
            self._has_several = True

    def _has_changed(self, word: int) -> bool:
        """Whether parameters with this word are not those that the last step left, or the last call if none was."""
        phases = self.phases
        expected = self._left if phases.steps else phases.before
        return phases.before != 0 and not self._has_several and word != expected

    def _find_parameters(self) -> None:
        """Sort them by name, as every rank does; most of the time they are the ones of the last call."""
        named = list(self._module.named_parameters(remove_duplicate=False))
        signature = [(name, id(parameter)) for name, parameter in named]
        if signature != self._signature:
            self._signature = signature
            self._parameters = [item.tensor for item in distinct(named, self._settings.ignore)]
            self._ids = frozenset(map(id, self._parameters))

    def _buffers(self) -> list[hold.Holding]:
        return hold.buffers(self._module, self._settings.ignore, self._settings.checks.local_buffers)


def _add(total: int, word: int) -> int:
    """Sums do not depend on the order in which a rank steps its optimizers."""
    return (total + word) % 2**64


_trails: "weakref.WeakSet[Trail]" = weakref.WeakSet()


@cache
def _follow_steps() -> None:
    internals.before_every_step(_begin_step)  # after the optimizer's own pre-hooks: one of them may make the call
    register_optimizer_step_post_hook(_after_step)


@internals.disable_dynamo
def _begin_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    has_closure = any(callable(argument) for argument in (*args[1:], *kwargs.values()))
    with torch.no_grad():
        for trail in list(_trails):
            if trail.holds(optimizer):
                trail.begin_step(optimizer, has_closure=has_closure)


@internals.disable_dynamo
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for trail in list(_trails):
            if trail.holds(optimizer):
                trail.end_step(optimizer)
            else:
                trail.note_other_step()
