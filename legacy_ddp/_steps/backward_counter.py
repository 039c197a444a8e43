"""Counts of backward passes per parameter since the last call.

The largest count is the number of micro-batches, which serves warnings and never arithmetic. A layer that runs inside
several re-entrant checkpoint segments is reached several times by one backward pass, with a pass inside of the pass for
each: then there are at most as many micro-batches as forward passes of the wrapper. The number is too high for such a
layer without a wrapper, and if a dropped gradient was zeroed in place; it is too low if several losses each use a part
of the model, and with ``create_graph=True``.
"""

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import contains, is_
from threading import get_ident
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from legacy_ddp import _torch as internals
from legacy_ddp._steps.policy import StepPolicy
from legacy_ddp._steps.result_sums import LastResult, ResultSums

_ANY_VERSION = -1  # of a parameter after a failed call
_Contains = Callable[[ResultSums, int, dict[str, Any]], bool]
# Every counter that exists. A WeakSet takes longer to walk through.
_counters: "list[weakref.ref[BackwardCounter]]" = []


class PassiveHook:
    """A hook after the accumulation that leaves the values of the gradient as they are."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class BackwardHook:
    """Counts in the lists of a counter, at ``index``. Refers to no counter and no parameter.

    ``last_result``: the gradient left by the last call. ``sums``: of all hooks of the counter. ``earlier_result``: the
    identity of the gradient left by a call with other parameters, before the present parameters replaced them; later
    writes to it, for example by clipping, do not matter, because the call has divided it all the same. ``divided``: of
    the counter: the positions with a result in which a later call has divided an earlier result again.
    ``grad_version``: of the gradient, after its last backward. ``left_version``: the same, after the gradient moved to
    its slot, if it moved. ``is_consumed``: a local step has used the counted gradients, and the next backward counts
    from 1. ``is_stepped``: the parameter was written to between the last call and the first backward since.
    ``first_pass``: the number of the backward pass that began the counted gradient, -1 if unknown. ``grad_identity``:
    of the gradient, after its last backward, or after it moved.
    """

    name: str
    index: int
    counts: list[int]
    versions: list[int]
    policy: StepPolicy
    last_result: LastResult
    sums: ResultSums
    divided: set[int]
    earlier_result: dict[str, Any] | None = None
    grad_version: int = -1
    left_version: int = -1
    thread: int = 0
    is_consumed: bool = False
    is_stepped: bool = False
    first_pass: int = -1
    grad_identity: dict[str, Any] | None = None

    def __call__(self, parameter: torch.Tensor) -> None:
        index, counts, versions, grad = self.index, self.counts, self.versions, parameter.grad
        was_consumed, is_continued, thread = self.is_consumed, True, 0
        if was_consumed:
            counts[index], self.is_consumed = 0, False
        if grad is not None:
            try:
                version = grad._version
            except RuntimeError:  # of an inference tensor
                version = 0
            # An addition in place raises the version of a tensor. So the same version in the same thread means that
            # `.grad` is a new tensor. In two threads it means that both added before either hook ran. If no step used
            # the previous gradient, it was dropped, and the count begins again: a batch that failed on one rank is no
            # uneven work. After a failed call that is known: a step, or a repair of the weights, does not matter then.
            thread = 0 if is_dynamo_compiling() else get_ident()  # get_ident() cannot be compiled
            is_new = version < self.grad_version or (version == self.grad_version and thread == self.thread)
            if is_new and versions[index] in (parameter._version, _ANY_VERSION):
                counts[index] = 0
            is_continued = counts[index] > 0 and version == self.left_version + 1
            if thread:
                self.policy.clock.accumulated = perf_counter()
                # Two threads may add before either hook runs.
                self._note_pass(grad, is_added=counts[index] > 0 and (is_continued or thread != self.thread))
            self.grad_version = self.left_version = version
            self.thread = thread
        count = counts[index]
        if not count or versions[index] == _ANY_VERSION:
            self.is_stepped = versions[index] not in (parameter._version, _ANY_VERSION)
            versions[index] = parameter._version
        if not is_continued and thread:
            # The version is compared first because it is quick: a new gradient has version 0, unless written to.
            if version and not (count or was_consumed) and grad is not None:
                self.sums.note(index, grad, version)
            elif self.sums.additions:
                self.sums.discard(index)
        counts[index] = count + 1

    def _note_pass(self, grad: torch.Tensor, *, is_added: bool) -> None:
        """``is_added``: nothing but backward has written to ``grad`` since its first pass, if it is the same tensor."""
        passes, number, identity = self.policy.passes, internals.current_backward(), internals.identity(grad)
        if number not in passes.numbers:
            number = passes.begin(number)
        # A gradient that was written to may have been cleared. A write on a device may leave no version.
        if is_added and identity is self.grad_identity and grad.is_cpu:
            self.first_pass = min(self.first_pass, number)  # of two threads the later pass may come first
        else:
            # Usually this pass alone is open.
            if len(passes.numbers) > 1 and passes.has_failed_since(self.first_pass, number):
                self.counts[self.index] = 0  # the gradient of a broken pass was dropped
            self.first_pass = number
        self.grad_identity = identity

    def take_over(self, earlier: "BackwardHook") -> None:
        """Go on with the count of an earlier hook on the same parameter."""
        self.grad_version, self.left_version, self.thread = earlier.grad_version, earlier.left_version, earlier.thread
        self.is_consumed, self.is_stepped = earlier.is_consumed, earlier.is_stepped
        self.first_pass, self.grad_identity = earlier.first_pass, earlier.grad_identity

    def was_reduced(self, grad: torch.Tensor | None, *, excluding: "BackwardHook | None" = None) -> bool:
        """Whether a call left ``grad``, and no backward has reached the gradient since.

        If ``excluding`` is this hook, only calls with other parameters count.
        """
        if grad is None or self.counts[self.index]:
            return False
        return internals.identity(grad) is self.earlier_result or (
            self is not excluding and self.last_result.is_in(grad)
        )

    def was_divided_again(self, grad: torch.Tensor | None) -> bool:
        """Whether ``grad`` is a result of :attr:`divided`, and no backward has reached it since."""
        return self.index in self.divided and self.was_reduced(grad)

    def was_written(self, grad: torch.Tensor | None) -> bool:
        """Whether the gradient was written to in place after its last backward. After a compiled backward unknown, so
        False. A write through ``.data``, or of a GradScaler, leaves the version as it is."""
        if grad is None or not self.thread:
            return False
        try:
            return 0 <= self.left_version < grad._version
        except RuntimeError:  # of an inference tensor
            return False

    def is_alone(self, hooks: Mapping[int, Any]) -> bool:
        """Whether no other of the ``hooks`` on the parameter may write to the gradient."""
        return len(hooks) == 1 or all(hook is self or isinstance(hook, PassiveHook) for hook in hooks.values())


def only_backward_hook(parameter: torch.Tensor) -> BackwardHook | None:
    """The hook of a counter on the parameter, None if several counters have a hook there."""
    (hooks,) = internals.accumulate_hooks([parameter])
    found = [hook for hook in hooks.values() if type(hook) is BackwardHook]
    return found[0] if len(found) == 1 else None


def remove_hooks(handles: list[RemovableHandle]) -> None:
    while handles:
        handles[-1].remove()
        handles.pop()


class _Attached(NamedTuple):
    """A hook, and the identity of its parameter when the hook was attached."""

    hook: BackwardHook
    identity: dict[str, Any]


class BackwardCounter:
    """Counts accumulations into ``.grad``; hand-assigned gradients are not counted. Keeps no parameter alive.

    ``divided``: as :class:`BackwardHook`.
    """

    def __init__(self, *, guarded: bool) -> None:
        self.policy = StepPolicy(guarded)
        self._counts: list[int] = []
        # Of each parameter, at its first backward since the last reset, or since a failed call.
        self._versions: list[int] = []
        self._handles: list[RemovableHandle] = []
        self._handle_ids: list[int] = []
        self._identities: list[dict[str, Any]] = []
        self._hooks: list[BackwardHook] = []
        self._has_earlier_results = False  # a call with other parameters left some of the gradients
        self.may_have_foreign_results = False  # or a call of another counter, as of is_attached_to()
        self.divided: set[int] = set()
        self.sums = ResultSums()
        weakref.finalize(self, remove_hooks, self._handles)
        _counters.append(weakref.ref(self, _counters.remove))

    def is_attached_to(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the hooks are on these parameters, in this order.

        The hooks identify a parameter. A weak reference to a parameter would make ``torch.utils.swap_tensors`` fail.
        """
        if len(parameters) != len(self._identities):
            return False
        if not all(map(is_, map(internals.identity, parameters), self._identities)):
            return False
        hooks = internals.accumulate_hooks(parameters)
        self.may_have_foreign_results = self._has_earlier_results or max(map(len, hooks), default=0) > 1
        return all(map(contains, hooks, self._handle_ids))

    def attach(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        last_results: Sequence[LastResult],
    ) -> None:
        """Count on these parameters from now on, instead of the parameters before; common parameters keep their counts.

        ``last_results``: for each parameter, the gradient left by the last call.
        """
        before = self._hooks_on(parameters)
        counts = [0 if found is None else found.hook.counts[found.hook.index] for found in before]
        divided = [index for index, found in enumerate(before) if found and found.hook.index in self.divided]
        earlier_results = [
            internals.identity(parameter.grad)
            if found is not None and parameter.grad is not None and found.hook.was_reduced(parameter.grad)
            else None
            for found, parameter in zip(before, parameters, strict=True)
        ]
        self._identities = []  # until all hooks are attached
        remove_hooks(self._handles)
        for found, parameter in zip(before, parameters, strict=True):
            if found is not None and internals.identity(parameter) is not found.identity:
                internals.attach_hooks(parameter)
        self._has_earlier_results = any(result is not None for result in earlier_results)
        self._counts[:] = counts
        self.mark_divided_again(divided)
        self._versions[:] = [parameter._version for parameter in parameters]
        self.sums = ResultSums(last_results, self._counts)
        for index, found in enumerate(before):
            if found is not None:
                self.sums.take_over(index, found.hook.sums, found.hook.index)
        self._hooks = [
            BackwardHook(
                name,
                index,
                self._counts,
                self._versions,
                self.policy,
                last_result,
                self.sums,
                self.divided,
                earlier_result,
            )
            for index, (name, last_result, earlier_result) in enumerate(
                zip(names, last_results, earlier_results, strict=True)
            )
        ]
        for hook, found in zip(self._hooks, before, strict=True):
            if found is not None:
                hook.take_over(found.hook)
        for hook, parameter in zip(self._hooks, parameters, strict=True):
            internals.add_accumulate_hook(parameter, hook, self._handles)
        self._handle_ids = [handle.id for handle in self._handles]
        self._identities = list(map(internals.identity, parameters))

    def already_reduced(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Positions of the parameters with a gradient reduced by a foreign call, and no backward since.

        A foreign call is a call of a different counter, or a call with different parameters.
        """
        of_parameters = zip(self._hooks, parameters, internals.accumulate_hooks(parameters), strict=True)
        return [index for index, found in enumerate(of_parameters) if _is_foreign_result(*found)]

    def is_after_foreign_call(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the first gradient is the result of a foreign call, as in :meth:`already_reduced`."""
        for own, parameter in zip(self._hooks, parameters, strict=True):
            if parameter.grad is not None:
                (hooks,) = internals.accumulate_hooks([parameter])
                return _is_foreign_result(own, parameter, hooks)
        return False

    def added_to_results(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Positions of the parameters with a gradient that is the result of a call plus a backward.

        Empty where some gradients were cleared, and steps reached a part of the parameters: optimizers that take turns
        clear their own gradients before they use them.
        """
        if not _have_additions():
            return []
        reached = self.reached(parameters)
        found = _find_results(reached, ResultSums.contains)
        is_turn = len(found) < len(reached) and len({own.is_stepped for own, _ in reached}) > 1
        return [] if is_turn else found

    def stale(self, parameters: Sequence[torch.Tensor], *, is_weighted: bool) -> list[int]:
        """Positions of the parameters with a gradient that holds an earlier result, with a backward added or without.

        Those of which a later call has divided the result again, or all if this call divides (``is_weighted``). Called
        only if there may be such.
        """
        found = _find_results(self.reached(parameters), ResultSums.contains) if _have_additions() else []
        if 0 in self._counts:
            found += [
                index
                for index, (count, hook, parameter) in enumerate(
                    zip(self._counts, self._hooks, parameters, strict=True)
                )
                if not count and hook.was_reduced(parameter.grad)
            ]
        return found if is_weighted else self.divided_again(found)

    def divided_again(self, positions: Iterable[int]) -> list[int]:
        """Those of the positions that :meth:`mark_divided_again` has marked."""
        return [index for index in positions if index in self.divided]

    def mark_divided_again(self, positions: Collection[int]) -> None:
        """The results at these positions, and at no other, hold an earlier result that a later call has divided."""
        self.divided.update(positions)
        self.divided.intersection_update(positions)

    def added_to_used_results(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether every gradient reached by backward is the result of a call, used by a step, plus this backward.

        False if reading the gradients would wait for a device.
        """
        if self.sums.may_wait():
            return False
        reached = self.reached(parameters)
        if not all(own.is_stepped for own, _ in reached):
            return False
        return len(_find_results(reached, ResultSums.contains_used)) == len(reached) > 0

    @property
    def micro_batches(self) -> int:
        """Backward passes since the last reset, without gradients that a local step has used."""
        if self.policy.has_local_steps:
            counts = [count for count, hook in zip(self._counts, self._hooks, strict=True) if not hook.is_consumed]
        else:
            counts = self._counts
        largest = max(counts, default=0)
        passes = self.policy.passes
        return min(largest, passes.forwards) if passes.has_nested and passes.forwards else largest

    def given_gradients(self, *, was_edited: bool) -> Collection[int] | None:
        """Positions of gradients that the script has put into ``.grad`` as parts of its memory: those to which backward
        has added, and then also those without a backward. None if backward, or a call, has made all gradients.

        ``was_edited``: as :meth:`was_first_edited`.
        """
        if self.policy.has_leaves:  # the tensors of the script were taken out of ``.grad``
            return None
        given = self.sums.given
        if given:
            return given.union(index for index, count in enumerate(self._counts) if not count)
        return () if was_edited or 0 in self._counts else None

    @property
    def accumulations(self) -> int:
        """Sum of the counts of all parameters: grows with every backward pass over a parameter."""
        return sum(self._counts)

    def was_stepped(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether every parameter reached by backward since the last reset was written to in place since then.

        An optimizer writes to all of them; a layer with renormalised weights writes to its own weight only. Returns
        True once per step: a script may catch the resulting error and go on.
        """
        for count, parameter, version in zip(self._counts, parameters, self._versions, strict=True):
            if count and version in (parameter._version, _ANY_VERSION):
                return False
        if not self.micro_batches:
            return False
        self.ignore_earlier_writes(parameters)
        return True

    def reached(self, parameters: Sequence[torch.Tensor]) -> list[tuple[BackwardHook, torch.Tensor]]:
        """The parameters reached by backward since the last reset, without gradients that a local step has used."""
        return [
            (hook, parameter)
            for count, hook, parameter in zip(self._counts, self._hooks, parameters, strict=True)
            if count and not hook.is_consumed
        ]

    def incomplete(self, parameters: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Names and gradients of :meth:`reached` that hold a part of a backward pass that an exception has ended.

        Gradients that were cleared and made again since then are complete: all their passes came later.
        """
        last = self.policy.passes.last_open
        if last < 0:
            return []
        return [
            (hook.name, grad)
            for hook, parameter in self.reached(parameters)
            if 0 <= hook.first_pass <= last and (grad := parameter.grad) is not None
        ]

    def was_first_edited(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the first gradient of :meth:`reached` was written to in place after its backward: a quick look."""
        for count, hook, parameter in zip(self._counts, self._hooks, parameters, strict=True):
            if count and not hook.is_consumed:
                return hook.was_written(parameter.grad)
        return False

    def were_all_edited(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether every gradient of :meth:`reached` was written to in place after its backward, by no other hook."""
        reached = self.reached(parameters)
        on_parameters = internals.accumulate_hooks(parameter for _, parameter in reached)
        return bool(reached) and all(
            own.was_written(parameter.grad) and own.is_alone(hooks)
            for (own, parameter), hooks in zip(reached, on_parameters, strict=True)
        )

    def ignore_earlier_writes(self, parameters: Sequence[torch.Tensor]) -> None:
        """Do not count earlier writes as a step."""
        self._versions[:] = [parameter._version for parameter in parameters]

    def note_failed_call(self) -> None:
        """A call has failed: writes to the parameters up to the next backward are no step, the ranks repair them."""
        self._versions[:] = [_ANY_VERSION] * len(self._versions)

    def note_gradients_removed(self, *, keep_counts: bool) -> None:
        """All gradients were removed: with ``keep_counts`` new gradients add to the counts, else they count from 1."""
        for hook in self._hooks:
            hook.grad_version = -1 if keep_counts else sys.maxsize
            hook.is_consumed = False
        self.sums.clear()

    def reset(self, parameters: Sequence[torch.Tensor] = ()) -> None:
        """Set all counts to 0. ``parameters``: given after a call that has left results."""
        if parameters and 0 in self._counts:  # all other versions were noted in the first backward
            for index in [index for index, count in enumerate(self._counts) if not count]:
                self._versions[index] = parameters[index]._version
        self._counts[:] = [0] * len(self._counts)
        self.sums.clear()
        self.policy.has_local_steps, self.policy.idle_calls = False, 0
        passes = self.policy.passes
        passes.numbers.clear()
        passes.forwards, passes.has_nested = 0, False
        for hook in self._hooks if self._has_earlier_results else ():
            hook.earlier_result = None
        self._has_earlier_results = False

    def _hooks_on(self, parameters: Sequence[torch.Tensor]) -> list[_Attached | None]:
        """For each parameter: the hook of this counter, None without a hook."""
        # After an interrupt in attach() there are fewer identities than handles.
        known = {
            handle.id: _Attached(hook, identity)
            for handle, hook, identity in zip(self._handles, self._hooks, self._identities, strict=False)
        }
        return [
            next((known[handle] for handle in handles if handle in known), None)
            for handles in internals.accumulate_hooks(parameters)
        ]


def _all_counters() -> list[BackwardCounter]:
    # Of a copy, because other threads may make counters meanwhile.
    return [counter for reference in tuple(_counters) if (counter := reference()) is not None]


def is_any_counting() -> bool:
    """Whether any parameter with a hook was reached by backward since the last reset of its counter."""
    return any(any(counter._counts) for counter in _all_counters())


def waiting_for_call(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that backward has reached after the last call of every counter on them."""
    found = []
    parameters = list(parameters)
    for parameter, hooks in zip(parameters, internals.accumulate_hooks(parameters), strict=True):
        counting = [hook for hook in hooks.values() if type(hook) is BackwardHook]
        if counting and all(hook.counts[hook.index] and not hook.is_consumed for hook in counting):
            found.append(parameter)
    return found


def is_any_divided_again() -> bool:
    """Whether any result holds an earlier result that a later call has divided."""
    return any(counter.divided for counter in _all_counters())


def _have_additions() -> bool:
    return any(counter.sums.additions for counter in _all_counters())


def note_uses(optimizer: torch.optim.Optimizer) -> None:
    """A step of ``optimizer`` has ended: note which results of calls it may have used."""
    if not any(counter.sums.awaits_step for counter in _all_counters()):  # no backward has added to a result until now
        return
    for group in optimizer.param_groups:
        for hooks in internals.accumulate_hooks(group["params"]):
            for hook in hooks.values():
                if type(hook) is BackwardHook:
                    hook.sums.note_step(hook.index)


def _find_results(reached: Sequence[tuple[BackwardHook, torch.Tensor]], contains: _Contains) -> list[int]:
    """Positions of the parameters with a gradient that is the result of a call, of any counter on the parameter, plus a
    backward, and not written to since. ``contains``: of the sums of that counter."""
    on_parameters = internals.accumulate_hooks(parameter for _, parameter in reached)
    return [
        own.index
        for (own, parameter), hooks in zip(reached, on_parameters, strict=True)
        if (grad := parameter.grad) is not None
        and not own.was_written(grad)
        and any(
            contains(hook.sums, hook.index, internals.identity(grad))
            for hook in hooks.values()
            if type(hook) is BackwardHook
        )
    ]


def _is_foreign_result(own: BackwardHook, parameter: torch.Tensor, hooks: Mapping[int, object]) -> bool:
    """Whether a foreign call left the gradient of ``parameter``. ``own``: the hook of this counter among ``hooks``."""
    return (len(hooks) > 1 or own.earlier_result is not None) and any(
        hook.was_reduced(parameter.grad, excluding=own) for hook in hooks.values() if type(hook) is BackwardHook
    )
