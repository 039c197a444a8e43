"""Gradients move to their slots while backward still runs: large ones, where that is cheaper than to wait.

What backward has just computed is in the caches, and the memory that it came in is free for the next one: so a step
takes one copy of the gradients in memory and not two, touches fewer fresh pages, and the call has less to copy.
"""

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from legacy_ddp._bucket import FlatBuffer
from legacy_ddp._counting import remove_hooks, watchers

# Smaller ones are cheaper copied all together. Other devices copy all together at any size: nothing was measured there.
SMALLEST_BYTES = 64 * 1024


class Adoption:
    """The hooks on the parameters of one plan. Keeps no parameter alive."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, remove_hooks, self._handles)

    def watch(self, shares: Iterable[tuple[FlatBuffer, Sequence[torch.Tensor]]]) -> None:
        """From now on, move the gradients of these parameters to those buffers, and no others."""
        remove_hooks(self._handles)
        for buffer, parameters in shares:
            for index, parameter in enumerate(parameters):
                if buffer.as_views and buffer.bucket.device.type == "cpu" and parameter.nbytes >= SMALLEST_BYTES:
                    handle = parameter.register_post_accumulate_grad_hook(_Hook(buffer, index))  # type: ignore[no-untyped-call]
                    self._handles.append(handle)


class _Hook:
    def __init__(self, buffer: FlatBuffer, index: int) -> None:
        self.buffer = buffer
        self.index = index

    def __call__(self, parameter: torch.Tensor) -> None:
        # Compiled autograd traces hooks. Where several wrappers count on a parameter, each has its own place for the
        # gradient, and those that look after it moved would not see that it is a new one.
        if not torch.compiler.is_compiling() and watchers(parameter) == 1:
            self.buffer.adopt(self.index, parameter)
