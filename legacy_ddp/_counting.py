"""How often backward reached each parameter since the last call: what "micro-batches" means here.

The largest count is the number of micro-batches. It is too high when one layer runs inside several re-entrant
checkpoint segments and too low when several losses use a part of the model each, so it feeds warnings and never the
arithmetic.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle


class BackwardCounter:
    """Counts accumulations into ``.grad``; hand-assigned gradients count nothing."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._counts: list[int] = []
        self._versions: list[int] = []
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles)

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Count on these from now on, in place of the ones before; what was counted on both stays counted."""
        _remove(self._handles)
        counted = dict(zip(self._ids, self._counts, strict=True))
        self._ids = [id(parameter) for parameter in parameters]
        self._counts[:] = [counted.get(key, 0) for key in self._ids]
        self._versions[:] = [parameter._version for parameter in parameters]
        for index, parameter in enumerate(parameters):
            hook = self._counting_hook(index)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    @property
    def micro_batches(self) -> int:
        """Backward passes since the last reset."""
        return max(self._counts, default=0)

    def stepped(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether a parameter was written to in place between its first backward since the last reset and now.

        Says so once: whoever catches the error that follows can go on.
        """
        written = False
        for index, parameter in enumerate(parameters):
            if self._counts[index] and parameter._version != self._versions[index]:
                written, self._versions[index] = True, parameter._version
        return written

    def reset(self) -> None:
        """Start counting anew."""
        self._counts[:] = [0] * len(self._counts)

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
