"""The hook on a parameter: counts how often backward reached the parameter."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from legacy_ddp import _torch as internals
from legacy_ddp._step_guard.policy import StepPolicy


@dataclass(slots=True, eq=False)
class BackwardHook:
    """Counts in the lists of a counter, at ``index``. Refers to no counter and no parameter.

    ``is_last_result``: whether a gradient is the object left by the last call. ``earlier_result``: the identity of the
    gradient left by a call with other parameters, before the present parameters replaced them. Later writes to the
    gradient, for example by clipping, do not matter: the call has divided the gradient all the same.
    ``is_consumed``: a local step has used the counted gradients; the next backward counts from 1.
    """

    name: str
    index: int
    counts: list[int]
    versions: list[int]
    policy: StepPolicy
    is_last_result: Callable[[torch.Tensor], bool]
    earlier_result: dict[str, Any] | None = None
    grad_version: int = -1
    thread: int = 0
    is_consumed: bool = False

    def __call__(self, parameter: torch.Tensor) -> None:
        index, counts, versions, grad = self.index, self.counts, self.versions, parameter.grad
        if self.is_consumed:
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
            self.grad_version, self.thread = version, thread
        count = counts[index]
        if not count:
            versions[index] = parameter._version
        counts[index] = count + 1

    def was_reduced(self, grad: torch.Tensor | None, *, excluding: "BackwardHook | None" = None) -> bool:
        """Whether a call left ``grad``, and no backward has reached the gradient since.

        If ``excluding`` is this hook, only calls with other parameters count.
        """
        if grad is None or self.counts[self.index]:
            return False
        return internals.identity(grad) is self.earlier_result or (self is not excluding and self.is_last_result(grad))


def count_backward_hooks(parameter: torch.Tensor) -> int:
    """How many counters have a hook on the parameter."""
    (hooks,) = internals.accumulate_hooks([parameter])
    return sum(type(hook) is BackwardHook for hook in hooks.values())


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Remove the hooks, and empty the list."""
    while handles:
        handles.pop().remove()
