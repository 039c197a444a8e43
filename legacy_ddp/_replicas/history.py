"""The digests that the calls of a wrapper compare, and the history of level "detail": digests of every phase."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from legacy_ddp._explainer import DifferingReplicas, ExplainedReplicas, explainer
from legacy_ddp._memory.layout import distinct, fingerprint
from legacy_ddp._ranks.agree import ranks_where
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.private_groups import Groups
from legacy_ddp._replicas import state
from legacy_ddp._replicas.state import (
    Begun,
    SharedBuffers,
    begin_digest,
    comparable,
    describe_membership,
    digest_all,
    gather_digests,
    is_digestible,
    parameter_groups,
)
from legacy_ddp._settings import Settings
from legacy_ddp._steps.policy import StepPolicy
from legacy_ddp._steps.step_counter import StepObserver
from legacy_ddp._torch.device import Reader


@dataclass
class StepDigests:
    """Digests (see :func:`digest_all`) in the order of the phases; 0 for a phase that did not happen."""

    parameters_at_call: int = 0  # as the last call left them
    gradients_at_call: int = 0  # as the last call left them
    steps: int = 0  # their number since the last call
    # The next four are sums over all these steps.
    membership: int = 0  # which parameters the stepped optimizers hold
    parameters_at_step: int = 0  # as the steps found them
    gradients_at_step: int = 0  # as the steps found them
    parameters_after_step: int = 0  # as the steps left them
    parameters: int = 0  # now
    buffers: int = 0  # now
    # The rest is evidence about this rank, and not in `digest`. A change that recurs at every step is no evidence: it
    # leaves the first four False.
    changed_before: bool = False  # parameters, between the call or the previous step, and a step
    changed_after: bool = False  # parameters, between the last step or the call, and now
    state_changed_before: bool = False  # optimizer state, between the previous step and a step
    state_changed_after: bool = False  # optimizer state, between the last step and now
    has_stale_parameter: bool = False  # an optimizer holds a tensor that is not in the model, in place of a parameter
    membership_text: str = ""  # the contents of the optimizers
    other_steps: int = 0  # of optimizers without any parameter of the model

    @property
    def digest(self) -> int:
        """One digest of everything that replicas share."""
        phases = (
            *(self.parameters_at_call, self.gradients_at_call),
            *(self.steps, self.membership, self.parameters_at_step, self.gradients_at_step),
            *(self.parameters_after_step, self.parameters, self.buffers),
        )
        return fingerprint(repr(phases).encode())


class SteppedOptimizers:
    """The optimizers that made a step since the last call. Keeps no optimizer alive."""

    def __init__(self) -> None:
        self._stepped: list[weakref.ref[torch.optim.Optimizer]] = []
        # Hyperparameters as of the last step: a scheduler may have made them equal again since.
        self._groups: WeakKeyDictionary[torch.optim.Optimizer, list[Mapping[str, Any]]] = WeakKeyDictionary()
        # Before the last step: the step gives state to an optimizer that had lost its state.
        self._had_state: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._had_state[optimizer] = any(optimizer.state.values())  # a parameter may have an empty state

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        # Copied, and described only after a difference: an optimizer may have hundreds of parameter groups.
        self._groups[optimizer] = [
            {
                key: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in optimizer.param_groups
        ]
        if not any(reference() is optimizer for reference in self._stepped):
            self._stepped.append(weakref.ref(optimizer))

    def clear(self) -> None:
        self._stepped.clear()

    @property
    def alive(self) -> list[torch.optim.Optimizer]:
        """The optimizers that still exist, in the order of their first steps."""
        return [optimizer for reference in self._stepped if (optimizer := reference()) is not None]

    def settings_of(self, optimizer: torch.optim.Optimizer) -> Iterator[state.Fact]:
        """The hyperparameters as of the last step, and whether there was state before it."""
        yield from state.settings_in(self._groups[optimizer])
        yield state.EARLIER_STATE, "some" if self._had_state.get(optimizer) else state.NONE


@dataclass
class Later:
    """A number that is there once a reader has read it, and 0 until then."""

    value: int = 0


def begin(reader: Reader, begun: Begun[int]) -> Later:
    (vectors, finish), later = begun, Later()

    def take(numbers: Sequence[Sequence[int]]) -> None:
        later.value = finish(numbers)

    reader.add(vectors, take)
    return later


class StateHistory:
    """Compares optimizer state after a step with the state before the next step. Local."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader  # compares when it has read the numbers
        self._after_step: WeakKeyDictionary[torch.optim.Optimizer, Later] = WeakKeyDictionary()
        self._was_changed = self._is_recurring = False

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        after = self._after_step.get(optimizer)
        if after is None:
            return
        now = self._begin(optimizer)

        def compare(_: object) -> None:
            self._was_changed |= now.value != after.value

        self._reader.add((), compare)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._after_step[optimizer] = self._begin(optimizer)

    def end_call(self) -> None:
        # A script that changes the state before every step does so on both sides of a call: this is no evidence.
        self._is_recurring, self._was_changed = self._was_changed, False

    def restart(self) -> None:
        """Discard the evidence: a repair of the state is no evidence."""
        self._after_step.clear()
        self._was_changed = False

    def snapshot(self) -> tuple[bool, bool]:
        """Whether state changed outside of a step: before a step since the last call, and since the last step."""
        if self._is_recurring:
            return False, False
        pairs = [(after, self._begin(optimizer)) for optimizer, after in list(self._after_step.items())]
        self._reader.read()
        return self._was_changed, any(after.value != now.value for after, now in pairs)

    def _begin(self, optimizer: torch.optim.Optimizer) -> Later:
        values = [value for state in optimizer.state.values() if isinstance(state, Mapping) for value in state.values()]
        # A subclass may not have bytes of its own and is not checked.
        plain = [value for value in values if type(value) is torch.Tensor and comparable(value) is value]
        return begin(self._reader, begin_digest(plain))


_UNKNOWN = Later()


class _AtStep(NamedTuple):
    """Digests at the start of a step: parameters and gradients of its optimizer, and all parameters; 0 for unknown."""

    parameters: Later = _UNKNOWN
    gradients: Later = _UNKNOWN
    all_parameters: Later = _UNKNOWN


class _Step(NamedTuple):
    found: _AtStep
    after: Later  # of the parameters of its optimizer
    expected: Later | None  # of all parameters, as the step should have found them; None if that is not known
    is_first: bool  # since the last call
    is_new: bool  # the first step since the last call with these parameters


class ReplicaDigests(StepObserver, ABC):
    """The digests of the replica of a wrapper, which its calls compare over the ranks.

    A subclass chooses the calls and the tensors: everything in every call, everything in every Nth call, or one part
    per call in turn.
    """

    def __init__(self, wrapper: nn.Module, settings: Settings, policy: StepPolicy) -> None:
        super().__init__(policy)
        self.buffers = SharedBuffers(settings)
        self.optimizers = SteppedOptimizers()
        self._wrapper = weakref.ref(wrapper)
        self._settings = settings
        self._next_call = 1
        self._taken: tuple[int, Any] | None = None  # the number of the coming call, and what _digest() has for it

    def begin_forward(self, *, is_training: bool) -> None:
        """In the first training forward since the last call, take the digest for the next call.

        ``is_training``: not in evaluation mode. To be called only in forwards with gradients.
        """
        try:
            self.buffers.begin_forward(self._module)
            # In a later forward a loop may hold other weights for a moment (sharpness-aware minimisation).
            if is_training and self._taken is None and self._is_due(self._next_call):
                self._taken = self._next_call, self._digest(self._next_call)
        except (RuntimeError, TypeError, ValueError):
            # A forward may run where bits cannot be read (fake tensors, function transforms). Then the call reads them.
            # Other exceptions, for example of a signal handler, end the forward.
            pass

    @abstractmethod
    def digest_of(self, call: Call) -> int | None:
        """The digest for the header of ``call``; None if this call compares nothing."""

    def note_agreement(self, groups: Groups, number: int) -> None:
        """The digests of all ranks are equal in call ``number``."""

    @abstractmethod
    def compare(self, call: Call, left_out: Collection[int], digests: Mapping[int, int]) -> ExplainedReplicas | None:
        """The differences if replicas differ. ``digests``: of the compared ranks. Collective after a difference."""

    @abstractmethod
    def end_call(self, call: Call, /) -> None:
        """The call has succeeded: begin with the time after it."""

    def restart(self) -> None:
        """Discard the digest, after a broadcast of parameters."""
        self._taken = None

    def begin_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:  # noqa: ARG002 - for subclasses
        self.optimizers.begin(optimizer)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.add(optimizer)
        self._taken = None  # of the weights before the step

    def _is_due(self, _: int, /) -> bool:
        """Whether the call of this number compares replicas."""
        return True

    @abstractmethod
    def _digest(self, number: int) -> object:
        """The digest for call ``number``, or what becomes the digest in the call."""

    @property
    def _module(self) -> nn.Module:
        wrapper: Any = self._wrapper()
        module: nn.Module = wrapper.module  # the user may have assigned a new module since the last call
        return module

    def unread(self) -> list[str]:
        """The names of the tensors that no call can compare."""
        return state.unread([*state.parameters(self._module, self._settings.ignore), *self.buffers.items(self._module)])

    def _items(self, *, with_groups: bool) -> list[state.StateItem]:
        """The items to compare after a difference. ``with_groups``: also the parameter group of each parameter."""
        module, ignore, optimizers = self._module, self._settings.ignore, self.optimizers.alive
        return [
            *state.parameters(module, ignore),
            *self.buffers.items(module),
            *state.optimizer_items(optimizers, module, self.optimizers.settings_of),
            *(parameter_groups(optimizers, module, ignore) if with_groups else ()),
        ]


class _Found(NamedTuple):
    """Replaced as a whole: an exception leaves no half of a change."""

    signature: Sequence[tuple[str, int]] = ()  # all names of parameters, with the ids of the tensors
    parameters: Sequence[torch.Tensor] = ()  # sorted by name


class StepHistory(ReplicaDigests):
    """Takes the digests of a wrapper: in its calls, and around every step of an optimizer that holds its parameters.

    On devices the host waits once, in the call: the call reads and compares all digests since the last call.
    """

    def __init__(self, wrapper: nn.Module, settings: Settings, policy: StepPolicy) -> None:
        super().__init__(wrapper, settings, policy)
        self.digests = StepDigests()
        self._reader = Reader()
        self._gradients_at_call = _UNKNOWN
        self._found = _Found()
        # Several optimizers have stepped between two calls. Then there is no evidence against this rank: it would need
        # a digest of all parameters at each step, and a hundred optimizers would cost a hundred times as much. The
        # digests that ranks share do not depend on this flag: perhaps only one rank has made a new optimizer.
        self._has_several = False
        self._parameters_after_step = _UNKNOWN  # all of them; unknown with several optimizers
        self._masks: set[bytes] = set()  # the parameters of each step that is in the digests
        # Changes before and after the steps that recur, for example in a script that clamps weights after every step.
        self._recurring = (False, False)
        self._was_changed_at_step = self._is_changed = False  # before a step since the last call; now
        self._state_history = StateHistory(self._reader)
        self._at_step = _AtStep()  # of the open step
        # True while the digests change. It stays True if an exception interrupts the change; then nothing is compared
        # until the digests begin anew.
        self._is_torn = False

    def digest_of(self, call: Call) -> int | None:
        """One digest of all phases since the last call; None if only a part of a phase was recorded."""
        self.forget_failed_step()
        with call.phase("digest"):
            if self._is_torn:
                self.restart()
            self._find_parameters()
            taken, self._taken, self._next_call = self._taken, None, call.number + 1
            digest = self._update(None if taken is None else taken[1])
            return None if self._is_torn else digest

    def update_digest(self) -> None:
        """Digest parameters and buffers now, outside of an all_reduce()."""
        self.forget_failed_step()
        self._find_parameters()
        self._update(None)

    def _update(self, taken: Later | None) -> int:
        was_torn, self._is_torn = self._is_torn, True
        parameters = taken or self._digest_later(self._parameters)
        buffers = self._digest_later(self._buffers())
        self._reader.read()
        digests, expected = self.digests, self._expected_parameters()
        digests.parameters, digests.buffers = parameters.value, buffers.value
        digests.gradients_at_call = self._gradients_at_call.value
        self._is_changed = expected is not None and parameters.value != expected.value
        self._is_torn = was_torn
        return digests.digest

    def compare(self, call: Call, left_out: Collection[int], digests: Mapping[int, int]) -> ExplainedReplicas | None:
        if len(set(digests.values())) <= 1:
            return None
        if self.buffers.learn(call, self._module, left_out):
            self.digests.buffers = digest_all(self._buffers())
            digests = gather_digests(call, self.digests.digest, left_out)
            if len(set(digests.values())) <= 1:
                return None
        moved = ranks_where(call, digest_all(self._parameters) != self.digests.parameters)
        items = self._items(with_groups=False)
        found = DifferingReplicas(call, items, digests, left_out, moved, evidence=self.snapshot)
        explained = explainer().replicas(found)
        self.restart()  # the difference is reported; an unrepaired difference shows again in the next call
        return explained

    def end_call(self, call: Call, /) -> None:
        self._is_torn = True
        self._recurring = self._was_changed_at_step, self._is_changed
        self._was_changed_at_step = False
        self._begin(StepDigests(parameters_at_call=self.digests.parameters))
        with call.phase("digest"):
            gradients = [parameter.grad for parameter in self._parameters if parameter.requires_grad]
            self._gradients_at_call = self._digest_later(gradients)
        self.optimizers.clear()
        self._state_history.end_call()
        self._is_torn = False

    def restart(self) -> None:
        """Discard all digests, after a broadcast of parameters or a report of the difference."""
        super().restart()
        self._reader.clear()
        self._begin(StepDigests())
        self._was_changed_at_step = self._is_changed = False
        self._state_history.restart()

    def snapshot(self) -> StepDigests:
        """The digests, with the evidence of this rank, as of the last :meth:`update_digest`."""
        digests = self.digests
        digests.changed_before = self._was_changed_at_step and not self._recurring[0]
        digests.changed_after = self._is_changed and not self._recurring[1]
        digests.state_changed_before, digests.state_changed_after = self._state_history.snapshot()
        named = distinct(self._module.named_parameters(remove_duplicate=False))
        digests.membership_text, digests.has_stale_parameter = describe_membership(self.optimizers.alive, named)
        return digests

    @torch.no_grad()
    def begin_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        self._has_several |= any(other is not optimizer for other in self.optimizers.alive)
        super().begin_step(optimizer, has_closure=has_closure)
        self._state_history.begin_step(optimizer)
        if has_closure:
            self._at_step = _AtStep()  # the closure computes the gradients later
            return
        held = self._parameters_of(optimizer)
        # Includes the gradient of a frozen parameter: a call does not reduce the gradient, but a step uses it.
        gradients = self._digest_later([parameter.grad for parameter in held])
        own, is_first = self._digest_later(held), not self.digests.steps
        all_parameters = self._digest_all_later(held, own) if is_first or not self._has_several else _UNKNOWN
        self._at_step = _AtStep(own, gradients, all_parameters)

    @torch.no_grad()
    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the digests before and after the step. A step that raised changed nothing and is not recorded."""
        was_torn, self._is_torn = self._is_torn, True
        digests, mask, held = self.digests, self._mask_of(optimizer), self._parameters_of(optimizer)
        after, expected = self._digest_later(held), self._expected_parameters()
        step = _Step(self._at_step, after, expected, is_first=not digests.steps, is_new=mask not in self._masks)
        self._reader.add((), lambda _: self._note_step(digests, step))
        self._masks.add(mask)
        self._parameters_after_step = _UNKNOWN if self._has_several else self._digest_all_later(held, after)
        self._state_history.end_step(optimizer)
        super().end_step(optimizer)
        digests.membership = _add(digests.membership, fingerprint(mask))
        digests.steps += 1
        self._is_torn = was_torn

    def _note_step(self, digests: StepDigests, step: _Step) -> None:
        found = step.found
        all_parameters = found.all_parameters.value
        if all_parameters and step.expected is not None:
            self._was_changed_at_step |= all_parameters != step.expected.value
        if step.is_first:  # includes parameters that no optimizer holds
            digests.parameters_at_step = all_parameters
        if step.is_new:  # a later step with these parameters begins with the result of this step
            digests.parameters_at_step = _add(digests.parameters_at_step, found.parameters.value)
        digests.gradients_at_step = _add(digests.gradients_at_step, found.gradients.value)
        digests.parameters_after_step = _add(digests.parameters_after_step, step.after.value)

    def count_other_step(self, _: torch.optim.Optimizer) -> None:
        """Count a step of an optimizer without these parameters: of another model, or of replaced parameters."""
        self.digests.other_steps += 1

    @torch.no_grad()
    def _digest(self, _: int) -> Later:
        # Parameters only. The digest of the step() shows a write between the forward and the step().
        self._find_parameters()
        return self._digest_later(self._parameters)

    def _digest_later(self, tensors: Sequence[torch.Tensor | None]) -> Later:
        return begin(self._reader, begin_digest(tensors))

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return list(compress(self._parameters, self._mask_of(optimizer)))

    def _mask_of(self, optimizer: torch.optim.Optimizer) -> bytes:
        """One byte for each parameter, sorted by name: whether the optimizer holds the parameter."""
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return bytes(id(parameter) in ids for parameter in self._parameters)

    def _digest_all_later(self, held: Sequence[torch.Tensor], digest_of_held: Later) -> Later:
        # Mostly the optimizer holds all parameters.
        return digest_of_held if len(held) == len(self._parameters) else self._digest_later(self._parameters)

    def _begin(self, digests: StepDigests) -> None:
        self.digests = digests
        self._gradients_at_call = _UNKNOWN
        self._masks.clear()

    def _expected_parameters(self) -> Later | None:
        """The digest of all parameters as the last step, or the last call, left them; None if not known."""
        digests = self.digests
        if not digests.parameters_at_call or self._has_several:
            return None
        return self._parameters_after_step if digests.steps else Later(digests.parameters_at_call)

    def _find_parameters(self) -> None:
        """Sort the parameters by name, if they have changed. Then the digest for the next call is out of date."""
        named = list(self._module.named_parameters(remove_duplicate=False))
        signature = [(name, id(parameter)) for name, parameter in named]
        if signature != self._found.signature:
            found = [item.tensor for item in distinct(named, self._settings.ignore)]
            self._taken = None
            self.ids = frozenset(map(id, found))
            self._found = _Found(signature, list(filter(is_digestible, found)))

    @property
    def _parameters(self) -> Sequence[torch.Tensor]:
        return self._found.parameters

    def _buffers(self) -> list[torch.Tensor]:
        values = [item.value for item in self.buffers.items(self._module)]
        return [value for value in values if isinstance(value, torch.Tensor)]


def _add(total: int, digest: int) -> int:
    """The sum mod 2**64, which does not depend on the order in which a rank steps its optimizers."""
    return (total + digest) % 2**64
