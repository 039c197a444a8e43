"""Hooks on parameters: large gradients move to their slots while backward still runs.

A gradient just computed by backward is in the caches, and after the move its memory is free for the next gradient. A
step then needs a single copy of the gradients in memory and not two, touches fewer fresh pages, and the call has less
to copy.
"""

import threading
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.utils.hooks import RemovableHandle, unserializable_hook

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.flat_buffer import FlatBuffer
from legacy_ddp._step_guard.backward_hook import PassiveHook, only_backward_hook, remove_hooks

# Smaller gradients are cheaper to copy all together. Other devices copy all together at any size: not measured there.
SMALLEST_BYTES = 64 * 1024


class BackwardCopy:
    """The hooks on the parameters of a plan. Keeps no parameter alive."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._thread = _BackwardThread()
        weakref.finalize(self, remove_hooks, self._handles)

    def attach(self, parameters_of: Iterable[tuple[FlatBuffer, Sequence[torch.Tensor]]]) -> None:
        """Move the gradients of these parameters to their buffers from now on; replaces all earlier hooks."""
        remove_hooks(self._handles)
        for buffer, parameters in parameters_of:
            for index, parameter in enumerate(parameters):
                if buffer.as_views and buffer.bucket.device.type == "cpu" and parameter.nbytes >= SMALLEST_BYTES:
                    self._handles.append(parameter.register_hook(self._thread.before_accumulation))  # type: ignore[no-untyped-call]
                    hook = _MoveHook(buffer, index, self._thread)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]


class _BackwardThread:
    """The thread of all backward passes over the parameters of a plan, as long as there is a single thread.

    torch adds to a ``.grad`` under a lock, but runs post-accumulate hooks outside of the lock. If a hook replaces
    ``.grad`` while a second thread adds to the old gradient, the sum is lost and the heap is corrupted. Therefore a
    second thread ends the moves for good, before its first addition: tensor hooks run before torch adds, and wait for a
    move in progress.
    """

    def __init__(self) -> None:
        self.is_single = True
        self.moving = threading.Lock()
        self._ident: int | None = None

    @internals.skip_tracing  # traced, the hook would return at once and notice no thread
    @unserializable_hook  # type: ignore[untyped-decorator]  # torch.save() warns of the hooks of a tensor otherwise
    def before_accumulation(self, _: torch.Tensor) -> None:
        """A tensor hook: the calling thread is about to add to a gradient."""
        if torch.compiler.is_compiling() or self._ident == threading.get_ident():
            return
        with self.moving:
            self.is_single = self.is_single and self._ident is None
            self._ident = threading.get_ident()


class _MoveHook(PassiveHook):
    def __init__(self, buffer: FlatBuffer, index: int, thread: _BackwardThread) -> None:
        self.buffer = buffer
        self.index = index
        self.thread = thread

    def __call__(self, parameter: torch.Tensor) -> None:
        # Compiled autograd traces hooks. Several wrappers on one parameter have several slots for the gradient: counter
        # hooks that run after the move would not notice that the gradient is new.
        if torch.compiler.is_compiling() or (counting := only_backward_hook(parameter)) is None:
            return
        with self.thread.moving:
            if self.thread.is_single and (moved := self.buffer.move_to_slot(self.index, parameter)) is not None:
                counting.left_version = moved._version
