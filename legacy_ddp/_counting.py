"""How often backward reached each parameter since the last call: what "micro-batches" means, and what a step may use.

The largest count is the number of micro-batches. It is too high when one layer runs inside several re-entrant
checkpoint segments, or a dropped gradient was zeroed in place; too low when several losses use a part of the model
each, and with ``create_graph=True``. So it feeds warnings and never the arithmetic.
"""

import sys
import weakref
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from legacy_ddp import _torch_internals as internals


@dataclass(slots=True)
class StepPolicy:
    """How steps on one counter's parameters are judged. ``sync_enabled``: false inside ``no_sync()``. ``has_leaves``:
    gradients were taken away to be summed, and wait for the call."""

    guarded: bool
    sync_enabled: bool = True
    has_leaves: bool = False


@dataclass(slots=True, eq=False)
class Watch:
    """The hook on one parameter: counts there, and tells who finds it there. Refers to no counter and no parameter."""

    name: str
    index: int
    counts: list[int]
    versions: list[int]
    policy: StepPolicy
    grad_version: int = -1

    def __call__(self, parameter: torch.Tensor) -> None:
        index, counts, grad = self.index, self.counts, parameter.grad
        if grad is not None:
            # Adding in place counts a tensor's version up, so this is a new one. If no step used the one before, that
            # was dropped: a batch which one rank could not do is no work that the others have too much.
            if grad._version <= self.grad_version and parameter._version == self.versions[index]:
                counts[index] = 0
            self.grad_version = grad._version
        if not counts[index]:
            self.versions[index] = parameter._version
        counts[index] += 1


class BackwardCounter:
    """Counts accumulations into ``.grad``; hand-assigned gradients count nothing. Keeps no parameter alive."""

    def __init__(self, *, guarded: bool) -> None:
        self.policy = StepPolicy(guarded)
        self._counts: list[int] = []
        self._versions: list[int] = []
        self._handles: list[RemovableHandle] = []
        self._watches: list[Watch] = []
        weakref.finalize(self, remove_hooks, self._handles)

    def watches(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters counted on, in this order: our hooks tell, where weak references would
        forbid torch to swap a parameter's contents."""
        return len(parameters) == len(self._handles) and all(
            handle.id in hooks
            for hooks, handle in zip(internals.accumulate_hooks(parameters), self._handles, strict=True)
        )

    def watch(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        """Count on these from now on, in place of the ones before; what was counted on both stays counted."""
        counts = [self._count_in(hooks) for hooks in internals.accumulate_hooks(parameters)]
        remove_hooks(self._handles)
        self._counts[:] = counts
        self._versions[:] = [parameter._version for parameter in parameters]
        self._watches = [Watch(name, i, self._counts, self._versions, self.policy) for i, name in enumerate(names)]
        for watch, parameter in zip(self._watches, parameters, strict=True):
            self._handles.append(parameter.register_post_accumulate_grad_hook(watch))  # type: ignore[no-untyped-call]

    @property
    def micro_batches(self) -> int:
        """Backward passes since the last reset."""
        return max(self._counts, default=0)

    @property
    def accumulations(self) -> int:
        """How often backward reached any of them since then: grows with every pass that reaches one."""
        return sum(self._counts)

    def stepped(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether every parameter that backward reached since the last reset was written to in place since then.

        An optimizer does that; a layer that renormalises its weight in forward does it to its own alone. Says so once:
        whoever catches the error that follows can go on.
        """
        reached = [index for index, count in enumerate(self._counts) if count]
        if not reached or any(parameters[index]._version == self._versions[index] for index in reached):
            return False
        self.note_written(parameters)
        return True

    def note_written(self, parameters: Sequence[torch.Tensor]) -> None:
        """What was written to them so far is known, and no step."""
        self._versions[:] = [parameter._version for parameter in parameters]

    def expect_more(self, *, are_kept: bool) -> None:
        """All gradients were taken away: new ones are counted on top of those that are kept, or from 1."""
        for watch in self._watches:
            watch.grad_version = -1 if are_kept else sys.maxsize

    def reset(self) -> None:
        """Start counting anew."""
        self._counts[:] = [0] * len(self._counts)

    def _count_in(self, hooks: Container[int]) -> int:
        return next((count for count, handle in zip(self._counts, self._handles, strict=True) if handle.id in hooks), 0)


def unsynchronized(parameters: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, Watch]]:
    """The parameters that no step may follow, each with the watch that says so: one that was asked to guard.

    Those that backward reached after the last call of every wrapper or function that counts there: where several share
    a parameter, one call is enough. A watcher inside ``no_sync()`` lets every step pass.
    """
    for parameter, hooks in zip(parameters, internals.accumulate_hooks(parameters), strict=True):
        guard = None
        for hook in hooks.values():
            if type(hook) is not Watch:  # somebody else's
                continue
            if not hook.counts[hook.index] or not hook.policy.sync_enabled:
                break
            if hook.policy.guarded and guard is None:
                guard = hook
        else:
            if guard is not None:
                yield parameter, guard


def watchers(parameter: torch.Tensor) -> int:
    """How many count on this parameter."""
    (hooks,) = internals.accumulate_hooks([parameter])
    return sum(type(hook) is Watch for hook in hooks.values())


def remove_hooks(handles: list[RemovableHandle]) -> None:
    """Take the hooks away, and empty the list."""
    while handles:
        handles.pop().remove()
