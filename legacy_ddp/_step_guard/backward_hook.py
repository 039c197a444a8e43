"""The hook on a parameter: counts how often backward reached the parameter."""

from collections.abc import Mapping
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from legacy_ddp import _torch as internals
from legacy_ddp._step_guard.policy import StepPolicy
from legacy_ddp._step_guard.result_sums import LastResult, ResultSums


class PassiveHook:
    """A hook after the accumulation that leaves the values of the gradient as they are."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class BackwardHook:
    """Counts in the lists of a counter, at ``index``. Refers to no counter and no parameter.

    ``last_result``: the gradient left by the last call. ``sums``: of all hooks of the counter. ``earlier_result``: the
    identity of the gradient left by a call with other parameters, before the present parameters replaced them. Later
    writes to the gradient, for example by clipping, do not matter: the call has divided the gradient all the same.
    ``grad_version``: of the gradient, after its last backward. ``left_version``: the same, after the gradient moved to
    its slot, if it moved. ``is_consumed``: a local step has used the counted gradients; the next backward counts from
    1. ``is_stepped``: the parameter was written to between the last call and the first backward since.
    """

    name: str
    index: int
    counts: list[int]
    versions: list[int]
    policy: StepPolicy
    last_result: LastResult
    sums: ResultSums
    earlier_result: dict[str, Any] | None = None
    grad_version: int = -1
    left_version: int = -1
    thread: int = 0
    is_consumed: bool = False
    is_stepped: bool = False

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
            # An addition in place raises the version of a tensor. An equal version means a new gradient, too, except
            # where two threads add first and run their hooks afterwards. If no step used the previous gradient, it was
            # dropped: restart the count, so that a batch which failed on one rank is not reported as uneven work.
            thread = 0 if is_compiling() else get_ident()  # get_ident() cannot be compiled
            is_new = version < self.grad_version or (version == self.grad_version and thread == self.thread)
            if is_new and parameter._version == versions[index]:
                counts[index] = 0
            is_continued = counts[index] > 0 and version == self.left_version + 1
            self.grad_version = self.left_version = version
            self.thread = thread
        count = counts[index]
        if not count:
            self.is_stepped = parameter._version != versions[index]
            versions[index] = parameter._version
        if not is_continued and thread:
            # A gradient that is new has version 0, unless an operation has written to it: the quick look.
            if version and not (count or was_consumed) and grad is not None and self.last_result.is_in(grad):
                self.sums.note(index, grad, version)
            elif self.sums.additions:
                self.sums.discard(index)
        counts[index] = count + 1

    def was_reduced(self, grad: torch.Tensor | None, *, excluding: "BackwardHook | None" = None) -> bool:
        """Whether a call left ``grad``, and no backward has reached the gradient since.

        If ``excluding`` is this hook, only calls with other parameters count.
        """
        if grad is None or self.counts[self.index]:
            return False
        return internals.identity(grad) is self.earlier_result or (
            self is not excluding and self.last_result.is_in(grad)
        )

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
    """Remove the hooks, and empty the list."""
    while handles:
        handles.pop().remove()
