"""How often backward reached each parameter since the last call: what "micro-batches" means, and what a step may use.

The largest count is the number of micro-batches. It is too high when one layer runs inside several re-entrant
checkpoint segments, or a dropped gradient was zeroed in place; too low when several losses use a part of the model
each, and with ``create_graph=True``. So it feeds warnings and never the arithmetic.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from legacy_ddp import _torch as internals

T = TypeVar("T")


@dataclass(slots=True)
class StepPolicy:
    """How steps on one counter's parameters are judged.

    ``has_leaves``: gradients were taken away to be summed, and wait for the call.
    """

    guarded: bool
    has_leaves: bool = False
    block_thread: int = 0  # of the outermost no_sync() block
    _open_blocks: int = 0  # a number, not a state to restore: blocks of two threads end in any order
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def sync_enabled(self) -> bool:
        """Whether no ``no_sync()`` block is open in any thread."""
        return self._open_blocks == 0

    def open_block(self) -> bool:
        """Count a ``no_sync()`` block; whether it is the outermost."""
        with self._lock:
            self._open_blocks += 1
            if self._open_blocks > 1:
                return False
            self.block_thread = threading.get_ident()
            return True

    def close_block(self) -> None:
        """A ``no_sync()`` block ended."""
        with self._lock:
            self._open_blocks -= 1


@dataclass(slots=True, eq=False)
class BackwardHook:
    """The hook on one parameter: counts there, and tells who finds it there. Refers to no counter and no parameter.

    ``is_last_result``: whether a gradient is the object that the last call left. ``earlier_result``: the identity of the gradient
    that a call with other parameters left, before these took their place. What was written into it does not matter: a
    gradient that was scaled or clipped was divided all the same.
    ``is_consumed``: a local step has used what was counted, so the next backward begins anew.
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
        index, counts, grad = self.index, self.counts, parameter.grad
        if self.is_consumed:
            counts[index], self.is_consumed = 0, False
        if grad is not None:
            # Adding in place counts a tensor's version up. An equal version is a new gradient, too, but not where two
            # threads add first and look afterwards. If no step used the previous gradient, it was dropped: restart the
            # count, so that a batch which failed on one rank is not reported as uneven work.
            version = _version(grad)
            thread = 0 if torch.compiler.is_compiling() else threading.get_ident()  # which cannot be compiled
            is_new = version < self.grad_version or (version == self.grad_version and thread == self.thread)
            if is_new and parameter._version == self.versions[index]:
                counts[index] = 0
            self.grad_version, self.thread = version, thread
        if not counts[index]:
            self.versions[index] = parameter._version
        counts[index] += 1

    def was_reduced(self, grad: torch.Tensor | None, *, excluding: "BackwardHook | None" = None) -> bool:
        """Whether a call left ``grad``, and no backward has reached it since; a call with other parameters at least, if
        this is the watch ``excluding``."""
        if grad is None or self.counts[self.index]:
            return False
        return internals.identity(grad) is self.earlier_result or (self is not excluding and self.is_last_result(grad))


class BackwardCounter:
    """Counts accumulations into ``.grad``; hand-assigned gradients count nothing. Keeps no parameter alive."""

    def __init__(self, *, guarded: bool) -> None:
        self.policy = StepPolicy(guarded)
        self._counts: list[int] = []
        self._versions: list[int] = []
        self._handles: list[RemovableHandle] = []
        self._identities: list[dict[str, Any]] = []
        self._hooks: list[BackwardHook] = []
        self._has_earlier_results = False  # a call with other parameters left some gradients of these
        weakref.finalize(self, remove_hooks, self._handles)

    def is_attached_to(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters counted on, in this order: our hooks tell, where weak references would
        forbid torch to swap a parameter's contents."""
        if len(parameters) != len(self._identities):
            return False
        return all(map(is_, map(internals.identity, parameters), self._identities)) and all(
            handle.id in hooks
            for hooks, handle in zip(internals.accumulate_hooks(parameters), self._handles, strict=True)
        )

    def attach(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        are_last_results: Sequence[Callable[[torch.Tensor], bool]],
    ) -> None:
        """Count on these from now on, in place of the ones before; what was counted on both stays counted."""
        # Shorter than the handles only after an interrupt in here.
        known: dict[int, tuple[BackwardHook, dict[str, Any]]] = {
            handle.id: (hook, identity)
            for handle, hook, identity in zip(self._handles, self._hooks, self._identities, strict=False)
        }
        before = [_find(hooks, known) for hooks in internals.accumulate_hooks(parameters)]
        counts = [0 if found is None else found[0].counts[found[0].index] for found in before]
        earlier_results = [
            internals.identity(grad)
            if found is not None and (grad := parameter.grad) is not None and found[0].was_reduced(grad)
            else None
            for found, parameter in zip(before, parameters, strict=True)
        ]
        self._identities = []  # until all hooks are there
        remove_hooks(self._handles)
        for found, parameter in zip(before, parameters, strict=True):
            if found is not None and internals.identity(parameter) is not found[1]:
                internals.attach_hooks(parameter)
        self._has_earlier_results = any(left is not None for left in earlier_results)
        self._counts[:] = counts
        self._versions[:] = [parameter._version for parameter in parameters]
        self._hooks = [
            BackwardHook(name, index, self._counts, self._versions, self.policy, is_last_result, left)
            for index, (name, is_last_result, left) in enumerate(
                zip(names, are_last_results, earlier_results, strict=True)
            )
        ]
        for hook, parameter in zip(self._hooks, parameters, strict=True):
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._identities = list(map(internals.identity, parameters))

    def already_reduced(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Positions of the parameters whose gradient a call left, of another counter or with other parameters, and that
        no backward has reached since."""
        return [
            index
            for index, (own, parameter, hooks) in enumerate(
                zip(self._hooks, parameters, internals.accumulate_hooks(parameters), strict=True)
            )
            if (len(hooks) > 1 or own.earlier_result is not None)
            and any(
                hook.was_reduced(parameter.grad, excluding=own) for hook in hooks.values() if type(hook) is BackwardHook
            )
        ]

    @property
    def micro_batches(self) -> int:
        """Backward passes since the last reset."""
        return max(self._counts, default=0)

    @property
    def accumulations(self) -> int:
        """How often backward reached any of them since then: grows with every pass that reaches one."""
        return sum(self._counts)

    def was_stepped(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether every parameter that backward reached since the last reset was written to in place since then.

        An optimizer does that; a layer that renormalises its weight in forward does it to its own alone. Says so once:
        whoever catches the error that follows can go on.
        """
        reached = [index for index, count in enumerate(self._counts) if count]
        if not reached or any(parameters[index]._version == self._versions[index] for index in reached):
            return False
        self.ignore_earlier_writes(parameters)
        return True

    def ignore_earlier_writes(self, parameters: Sequence[torch.Tensor]) -> None:
        """What was written to them so far is known, and no step."""
        self._versions[:] = [parameter._version for parameter in parameters]

    def note_gradients_removed(self, *, are_kept: bool) -> None:
        """All gradients were taken away: new ones are counted on top of those that are kept, or from 1."""
        for hook in self._hooks:
            hook.grad_version = -1 if are_kept else sys.maxsize
            hook.is_consumed = False

    def reset(self) -> None:
        """Start counting anew."""
        self._counts[:] = [0] * len(self._counts)
        for hook in self._hooks if self._has_earlier_results else ():
            hook.earlier_result = None
        self._has_earlier_results = False


def _find(hooks: Iterable[int], known: Mapping[int, T]) -> T | None:
    """What is known of one of the hooks, by the ids of their handles."""
    return next((known[hook] for hook in hooks if hook in known), None)


def _version(grad: torch.Tensor) -> int:
    return 0 if grad.is_inference() else grad._version  # inference tensors have none


def unsynchronized(parameters: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, BackwardHook]]:
    """The parameters that no step may follow, each with the watch that says so: one that was asked to guard.

    Those that backward reached after the last call of every wrapper or function that counts there: where several share
    a parameter, one call is enough. A watcher inside ``no_sync()`` lets every step pass, and notes that it uses up what
    was counted; but not where leaves are counted, which wait for the call whatever a step does.
    """
    for parameter, hooks in zip(parameters, internals.accumulate_hooks(parameters), strict=True):
        guard = None
        for hook in hooks.values():
            if type(hook) is not BackwardHook:  # somebody else's
                continue
            if not hook.counts[hook.index]:
                break
            if not hook.policy.sync_enabled:
                hook.is_consumed = not hook.policy.has_leaves
                break
            if hook.policy.guarded and guard is None:
                guard = hook
        else:
            if guard is not None:
                yield parameter, guard


def count_backward_hooks(parameter: torch.Tensor) -> int:
    """How many count on this parameter."""
    (hooks,) = internals.accumulate_hooks([parameter])
    return sum(type(hook) is BackwardHook for hook in hooks.values())


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Take the hooks away, and empty the list."""
    while handles:
        handles.pop().remove()
