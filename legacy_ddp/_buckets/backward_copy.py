"""Gradients move to their slots while backward still runs: large ones, where that is cheaper than to wait.

What backward has just computed is in the caches, and the memory that it came in is free for the next one: so a step
takes one copy of the gradients in memory and not two, touches fewer fresh pages, and the call has less to copy.
"""

import threading
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.utils.hooks import RemovableHandle, unserializable_hook

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.flat_buffer import FlatBuffer
from legacy_ddp._step_guard.backward_counter import count_backward_hooks, remove_hooks

# Smaller ones are cheaper copied all together. Other devices copy all together at any size: nothing was measured there.
SMALLEST_BYTES = 64 * 1024


class BackwardCopy:
    """The hooks on the parameters of one plan. Keeps no parameter alive."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._thread = _BackwardThread()
        weakref.finalize(self, remove_hooks, self._handles)

    def attach(self, shares: Iterable[tuple[FlatBuffer, Sequence[torch.Tensor]]]) -> None:
        """From now on, move the gradients of these parameters to those buffers, and no others."""
        remove_hooks(self._handles)
        for buffer, parameters in shares:
            for index, parameter in enumerate(parameters):
                if buffer.as_views and buffer.bucket.device.type == "cpu" and parameter.nbytes >= SMALLEST_BYTES:
                    self._handles.append(parameter.register_hook(self._thread.before_accumulation))  # type: ignore[no-untyped-call]
                    hook = _Hook(buffer, index, self._thread)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]


class _BackwardThread:
    """The thread that runs all backward passes over the parameters of one plan, as long as there is only one.

    torch adds to a ``.grad`` under a lock, but runs post-accumulate hooks outside of it. A hook that replaces ``.grad``
    while a second thread adds to the old one loses that sum, and corrupts the heap. So a second thread ends the moves
    for good, before its first addition: tensor hooks run before torch adds, and wait for a move that is under way.
    """

    def __init__(self) -> None:
        self.is_alone = True
        self.moving = threading.Lock()
        self._ident: int | None = None

    @internals.runs_as_it_is  # traced, it would return at once, and notice no thread
    @unserializable_hook  # type: ignore[untyped-decorator]  # torch.save() warns of the hooks of a tensor otherwise
    def before_accumulation(self, _: torch.Tensor) -> None:
        """A tensor hook: the calling thread is about to add to a gradient."""
        if torch.compiler.is_compiling() or self._ident == threading.get_ident():
            return
        with self.moving:
            self.is_alone = self.is_alone and self._ident is None
            self._ident = threading.get_ident()


class _Hook:
    def __init__(self, buffer: FlatBuffer, index: int, thread: _BackwardThread) -> None:
        self.buffer = buffer
        self.index = index
        self.thread = thread

    def __call__(self, parameter: torch.Tensor) -> None:
        # Compiled autograd traces hooks. Where several wrappers count on a parameter, each has its own place for the
        # gradient, and those that look after it moved would not see that it is a new one.
        if torch.compiler.is_compiling() or count_backward_hooks(parameter) != 1:
            return
        with self.thread.moving:
            if self.thread.is_alone:
                self.buffer.move_to_slot(self.index, parameter)
