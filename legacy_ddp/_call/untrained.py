"""Detection of training without effect, or of each rank alone: gradients that are cleared before the call, or that no
step uses, and steps without a call.

A single call is no evidence: a rank may drop its gradients, and a step may come later. Evidence is a series of calls,
or of forward passes. If gradients are there and parameters change, the checks cost a comparison in each call, and a
look at each parameter in every 16th call.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._call.check import ALWAYS, Check, LocalStep, Subject
from legacy_ddp._log import warn
from legacy_ddp._memory.flat_buffer import ABSENT
from legacy_ddp._memory.layout import Layout
from legacy_ddp._ranks.agree import Agreement
from legacy_ddp._ranks.header import Flag
from legacy_ddp._steps.backward_counter import waiting_for_call
from legacy_ddp._steps.guard import hooks_of_script
from legacy_ddp._steps.policy import StepPolicy
from legacy_ddp._steps.step_counter import StepObserver
from legacy_ddp._text import name_ranks
from legacy_ddp._torch import device as devices

_CLEARED_CALLS = 5
_WINDOW = 16  # calls between two looks at the parameters
_STEPS = 5  # in a window: fewer are no evidence
_LOCAL_STEPS = 20
_FORWARDS = 8  # without a call: after more, parameters are compared
_WRITES = 10  # between such forwards
_SAMPLED, _SAMPLE = 4, 64  # parameters, and elements of each, whose values are compared

_CLEAR_LATER = "call zero_grad() between step() and the next backward()"
_NOTHING = f"nothing is trained;\n{_CLEAR_LATER}"
_ZEROS = f"zeros are averaged in their place;\n{_CLEAR_LATER}; a rank without data passes skip=True, or\nsample_size=0"
_IN_HOOK = (
    "the parameters have hooks of the script:\n  {}\n"
    "a hook that steps or clears gradients inside of backward() leaves nothing to reduce: remove it, and step\n"
    "once, after backward() and all_reduce()"
)


class ClearedGradients(Check):
    """Warns if backward runs on a rank, and then every gradient is cleared before the call, in call after call.

    Zeros that backward has written are no evidence: a batch without a loss may be meant to count as zeros.
    """

    section = "Gradients that were cleared before the call"

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.level != "off"
        self._calls: dict[int, int] = {}  # by rank: calls in a row

    def facts(self, step: LocalStep) -> None:
        header = step.header
        if not header.norm_bits and header.micro_batches and _were_cleared(step):  # the norm is 0, or unknown
            header.flags |= Flag.CLEARED

    def observe(self, step: LocalStep, agreement: Agreement) -> str | None:
        if not agreement.some_flags & Flag.CLEARED:
            self._calls = {}
            return None
        self._calls = {rank: self._calls.get(rank, 0) + 1 for rank in agreement.ranks_with(Flag.CLEARED)}
        ranks = [rank for rank, calls in self._calls.items() if calls >= _CLEARED_CALLS]
        if not ranks:
            return None
        effect = _NOTHING if len(ranks) == len(agreement.participants) else _ZEROS
        hooks = hooks_of_script(step.plan.parameters)  # of rank 0
        return (
            f"{step.call}: on {name_ranks(ranks)} every gradient was cleared between backward and the call,\n"
            f"in {_CLEARED_CALLS} calls in a row (warned once): "
            + (_IN_HOOK.format(", ".join(hooks)) if hooks else effect)
        )


def _were_cleared(step: LocalStep) -> bool:
    """Whether every gradient that backward has reached is None, or zero and written to after backward by no hook."""
    kinds, norm = step.packed.kinds, step.header.local_norm
    if norm is None and kinds.count(ABSENT) < len(kinds):  # on a device: no norm without a wait
        return False
    reached = step.counter.reached(step.plan.parameters)
    on_parameters = internals.accumulate_hooks(parameter for _, parameter in reached)
    return bool(reached) and all(
        kinds[own.index] == ABSENT or (own.was_written(parameter.grad) and own.is_alone(hooks))
        for (own, parameter), hooks in zip(reached, on_parameters, strict=True)
    )


class StepKinds(StepObserver):
    """Counts steps: ``own`` of optimizers with one of the parameters, ``idle`` of others without new gradients.

    A step of another optimizer is idle if its tensors have no gradients, or those of its step before.
    """

    def __init__(self, policy: StepPolicy) -> None:
        super().__init__(policy)
        # Of each other optimizer: identity and version of its first gradient, in its last step.
        self._marks: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[object, int]] = weakref.WeakKeyDictionary()
        self.own = self.idle = 0

    def end_step(self, _: torch.optim.Optimizer) -> None:
        self.own += 1

    def count_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        grad = next((grad for parameter in held if (grad := parameter.grad) is not None), None)
        if grad is None:
            self.idle += bool(held)
            return
        mark, before = (internals.identity(grad), internals.version_of(grad)), self._marks.get(optimizer)
        self.idle += before is not None and before[0] is mark[0] and before[1] == mark[1]
        self._marks[optimizer] = mark


class UntrainedParameters(Check):
    """Warns of parameters whose gradients are reduced, but that no step writes to and no optimizer holds.

    Looks at all parameters if no optimizer with one of them steps, but an optimizer without new gradients does.
    Otherwise only at those that were frozen or missing in the first plan, and at those in place of which an optimizer
    holds other tensors: further parameters without an optimizer may be meant as frozen. Steps by hand, and optimizers
    of copies, write to the parameters, or change their values alone: a sample of some values is compared.
    """

    section = "Parameters that no step changes"
    awaits = 0  # until there is a text

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.level != "off"
        self._planner = subject.planner
        self._steps = StepKinds(subject.planner.counter.policy) if self.is_on else None
        self._layout: Layout | None = None  # of the parameters that are watched
        self._later: list[int] = []  # positions of those that are not in the first plan
        self._versions: list[int] = []
        self._samples: dict[int, torch.Tensor] = {}
        self._calls = 0
        self._is_known = False  # the optimizers were searched for this plan, which may take seconds
        self._text: str | None = None

    def facts(self, step: LocalStep) -> None:
        if step.plan.layout is not self._layout:  # a plan of the same layout has the same parameters
            self._watch(step)
        elif self._calls < _WINDOW - 1:
            self._calls += 1
        else:
            self._look(step)
            self._restart(step.plan.parameters)

    def observe(self, step: LocalStep, agreement: Agreement) -> str | None:  # noqa: ARG002 - found before the exchange
        return self._text

    def _watch(self, step: LocalStep) -> None:
        plan, first = step.plan, self._planner.first_parameters
        self._layout, self._is_known = plan.layout, False
        self._later = [
            index
            for index, (slot, parameter) in enumerate(zip(plan.layout.slots, plan.parameters, strict=True))
            if first.get(slot.name) is not internals.identity(parameter)
        ]
        if self._steps is not None:
            self._steps.ids = frozenset(map(id, plan.parameters))
        self._restart(plan.parameters)

    def _restart(self, parameters: Sequence[torch.Tensor]) -> None:
        self._calls = 0
        self._versions = list(map(internals.version_of, parameters))
        sampled = {*range(min(_SAMPLED, len(parameters))), *self._later[:_SAMPLED]}
        self._samples = {index: _sample(parameters[index]).clone() for index in sampled}
        if self._steps is not None:
            self._steps.forget_failed_step()
            self._steps.own = self._steps.idle = 0

    def _look(self, step: LocalStep) -> None:
        """Compare the parameters that backward has reached with their state at the begin of the window."""
        if self._steps is None or self._steps.own + self._steps.idle < _STEPS:
            return
        parameters = step.plan.parameters
        reached = [own.index for own, _ in step.counter.reached(parameters)]
        unwritten = [index for index in reached if internals.version_of(parameters[index]) == self._versions[index]]
        is_all = not self._steps.own and len(unwritten) == len(reached)
        if not is_all:
            later = set(self._later) if self._steps.own >= _STEPS else set()
            unwritten = [index for index in unwritten if index in later]
        if unwritten and not self._is_known and not self._has_other_values(parameters, unwritten):
            self._find_optimizer(step, unwritten, is_all=is_all)

    def _has_other_values(self, parameters: Sequence[torch.Tensor], indices: Sequence[int]) -> bool:
        return any(  # a write through .data changes values, and no version
            not torch.equal(sample, _sample(parameters[index]))
            for index, sample in self._samples.items()
            if index in indices
        )

    def _find_optimizer(self, step: LocalStep, unwritten: Sequence[int], *, is_all: bool) -> None:
        plan, first = step.plan, self._planner.first_parameters
        held, replaced = _held_by_optimizers(plan.parameters)
        slots = plan.layout.slots
        lost = [
            index
            for index in unwritten
            if id(parameter := plan.parameters[index]) not in held
            and (is_all or slots[index].name not in first or parameter.shape in replaced)
        ]
        self._is_known = True
        if not lost:
            return
        self.is_on, self.awaits = False, ALWAYS
        is_replaced = is_all or slots[lost[0]].name in first
        self._text = (
            f"{step.call}: {len(lost)} of {len(slots)} parameters with gradients, first {slots[lost[0]].name!r}, were\n"
            f"written to by no step in {_WINDOW} calls, and no optimizer holds them (warned once):\n"
            + (
                "an optimizer that steps holds other tensors in their place, of another module, or of this module\n"
                "before load_state_dict(assign=True) or a new layer; make the optimizer of model.parameters() again"
                if is_replaced
                else "they were frozen, or not there, at the beginning: pass them to optimizer.add_param_group(), or\n"
                "freeze them"
            )
        )


class LocalStepsAlone(Check):
    """Warns if every step until now was inside no_sync(), with a call there, which does nothing."""

    section = "Every step inside no_sync()"

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.level != "off"
        self._policy = subject.planner.counter.policy
        self._steps = 0

    def end(self, step: LocalStep) -> None:  # noqa: ARG002 - any call will do
        self.is_on = False

    def idle_call(self) -> str | None:
        self._steps += self._policy.has_stepped_locally
        self._policy.has_stepped_locally = False
        if self._steps < _LOCAL_STEPS:
            return None
        self.is_on = False
        return (
            f"{_LOCAL_STEPS} steps were made inside no_sync(), where all_reduce() does nothing, and none outside\n"
            "(told once): each rank trains alone; put only the micro-batches before the last into no_sync(), and\n"
            "call and step outside; for steps that are meant for each rank alone, leave out the call"
        )


class ForgottenCall(Check):
    """Warns if backward makes gradients and the weights change, but no call is made: each rank trains alone.

    A step of an optimizer with the parameters raises at once. This check finds steps by hand, and of optimizers of
    copies. They change the versions of parameters, or only values with a write to ``.data``. A sample of parameters is
    compared between two forward passes: in ten comparisons most of them must have changed. A change inside of a
    ``no_sync()`` block is meant for the rank alone.

    If calls come in time, the check costs a comparison of numbers. Parameters are compared (on a device the host waits)
    only after more forward passes than usual without a call, until some comparisons in a row find no change.
    """

    section = "A forgotten call"

    def __init__(self, subject: Subject) -> None:
        self.is_on = subject.settings.checks.guards_steps and subject.wrapper is not None
        self._wrapper = subject.wrapper_reference
        self._policy = subject.planner.counter.policy
        self._usual = _FORWARDS  # forward passes without a call
        self._seen: list[tuple[object, int, torch.Tensor]] = []  # identity, version and values, in the last look
        self._writes = self._idle = 0

    def facts(self, step: LocalStep) -> None:  # noqa: ARG002 - any call will do
        if (forwards := self._policy.passes.forwards) > self._usual:
            self._usual = 2 * forwards
            self.forget()

    def begin_forward(self, *, is_training: bool) -> None:  # noqa: ARG002 - eval mode may train, too
        if self._policy.passes.forwards > self._usual and self.is_on and self._policy.sync_enabled:
            self._look()

    def change_block(self, *, is_open: bool) -> None:
        if self._policy.passes.forwards > self._usual and self.is_on:
            if is_open:
                self._look()
            else:
                self._seen = self._read()

    def _look(self) -> None:
        if devices.is_capturing():
            return
        before, self._seen = self._seen, self._read()
        if not before or [id(mark[0]) for mark in before] != [id(mark[0]) for mark in self._seen]:
            return
        changed = [
            version != now or not torch.equal(values, present)
            for (_, version, values), (_, now, present) in zip(before, self._seen, strict=True)
        ]
        if 2 * sum(changed) <= len(changed):
            self._idle += 1
            if self._idle == _FORWARDS:
                self._usual = 2 * self._policy.passes.forwards
                self.forget()
            return
        self._writes, self._idle = self._writes + 1, 0
        if self._writes == _WRITES:
            self.is_on = False
            self.forget()
            self._tell()

    def _read(self) -> list[tuple[object, int, torch.Tensor]]:
        """Identity, version and values of some of the parameters that wait for a call."""
        wrapper: Any = self._wrapper()  # not None: its forward runs
        waiting = waiting_for_call(parameter for parameter in wrapper.parameters() if parameter.requires_grad)
        spread = waiting[:: len(waiting) // _SAMPLED + 1]
        return [(internals.identity(each), internals.version_of(each), _sample(each).clone()) for each in spread]

    def forget(self) -> None:
        self._seen, self._writes, self._idle = [], 0, 0

    def _tell(self) -> None:
        wrapper: Any = self._wrapper()
        kind = self._policy.module_class
        try:
            rank = wrapper.process_group.rank()
        except (TypeError, ValueError):  # no group, or not any more: the forward goes on
            return
        warn(
            rank,
            f"the weights of the wrapped {kind} have changed {_WRITES} times between forward passes, with\n"
            "gradients of this rank alone, and its all_reduce() was not called (told once): a step by hand, or of an\n"
            "optimizer that holds copies of weights, uses gradients that no call has reduced; call all_reduce() of\n"
            "this wrapper between backward() and that step; steps meant for this rank alone belong inside no_sync()",
            self.section,
            is_everywhere=True,
        )


def _held_by_optimizers(parameters: Sequence[torch.Tensor]) -> tuple[set[int], set[torch.Size]]:
    """The ids of all tensors that the optimizers of this process hold, and the shapes of those that may stand in place
    of parameters: in an optimizer that also has parameters, or without a gradient."""
    own = set(map(id, parameters))
    held: set[int] = set()
    others: set[torch.Size] = set()
    for optimizer in internals.all_optimizers():
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        has_own = not own.isdisjoint(map(id, tensors))
        held.update(map(id, tensors))
        others.update(each.shape for each in tensors if id(each) not in own and (has_own or each.grad is None))
    return held, others


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    """The first elements of the first row of the parameter."""
    row = parameter.detach()
    while row.dim() > 1 and row.numel():
        row = row[0]
    return row.flatten()[:_SAMPLE]
