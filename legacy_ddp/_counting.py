"""How often backward reached each parameter since the last call: what "micro-batches" means here.

The largest count is the number of micro-batches. It is too high when one layer runs inside several re-entrant
checkpoint segments and too low when several losses use a part of the model each, so it feeds warnings and never the
arithmetic.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from legacy_ddp import _torch_internals as internals


class BackwardCounter:
    """Counts accumulations into ``.grad``; hand-assigned gradients count nothing. Keeps no parameter alive."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._versions: list[int] = []
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles)

    def watches(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters counted on, in this order: our hooks tell, where weak references would
        forbid torch to swap a parameter's contents."""
        return len(parameters) == len(self._handles) and all(
            handle.id in internals.accumulate_hooks(parameter)
            for parameter, handle in zip(parameters, self._handles, strict=True)
        )

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Count on these from now on, in place of the ones before; what was counted on both stays counted."""
        counts = [self._count_of(parameter) for parameter in parameters]
        _remove(self._handles)
        self._counts[:] = counts
        self._versions[:] = [parameter._version for parameter in parameters]
        for index, parameter in enumerate(parameters):
            hook = self._counting_hook(index)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    @property
    def micro_batches(self) -> int:
        """Backward passes since the last reset."""
        return max(self._counts, default=0)

    def stepped(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether every parameter that backward reached since the last reset was written to in place since then.

        An optimizer does that; a layer that renormalises its weight in forward does it to its own alone. Says so once:
        whoever catches the error that follows can go on.
        """
        reached = [index for index, count in enumerate(self._counts) if count]
        written = [index for index in reached if parameters[index]._version != self._versions[index]]
        if not reached or len(written) < len(reached):
            return False
        for index in written:
            self._versions[index] = parameters[index]._version
        return True

    def reset(self) -> None:
        """Start counting anew."""
        self._counts[:] = [0] * len(self._counts)

    def _count_of(self, parameter: torch.Tensor) -> int:
        hooks = internals.accumulate_hooks(parameter)
        return next((count for count, handle in zip(self._counts, self._handles, strict=True) if handle.id in hooks), 0)

    def _counting_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        counts, versions = self._counts, self._versions  # not self: the hook must not keep the counter alive

        def count(parameter: torch.Tensor) -> None:
            if not counts[index]:
                versions[index] = parameter._version
            counts[index] += 1

        return count


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
