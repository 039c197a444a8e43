"""Callbacks for the events of a wrapper or module."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec

import torch
from torch.utils.hooks import RemovableHandle

from legacy_ddp._argument_errors import argument_errors
from legacy_ddp._record import SyncRecord

P = ParamSpec("P")


class Event(OrderedDict[int, Callable[P, object]], Generic[P]):
    """Callbacks of an event, by the id of the handle."""

    @argument_errors
    def add(self, callback: Callable[P, object]) -> RemovableHandle:
        """Call ``callback`` at every event from now on, until the handle's ``remove()``.

        Raises:
            TypeError: ``callback`` is not callable.
        """
        if not callable(callback):
            raise TypeError(f"callback is not callable: got {callback!r}, expected callback(record)")
        handle = RemovableHandle(self)
        self[handle.id] = callback
        return handle

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call every callback, in the order of registration."""
        for callback in tuple(self.values()):
            callback(*args, **kwargs)


class Observers:
    """Events of a wrapper or module. An event without callbacks is false, so that a call path tests one attribute."""

    def __init__(self) -> None:
        # A forward pass of the wrapper begins, not inside compiled code: callback(args, kwargs).
        self.forward: Event[[tuple[Any, ...], Mapping[str, Any]]] = Event()
        # A call begins, outside of the modes of torch that a call sets: callback(). No exception.
        self.called: Event[[]] = Event()
        # Local gradients by name, before the exchange: callback(grads). An exception ends the call on all ranks.
        self.local: Event[[Mapping[str, torch.Tensor | None]]] = Event()
        # A call succeeded, also a call of a rank that has left join(): callback(record).
        self.reduced: Event[[SyncRecord]] = Event()
        # all_reduce(), or all_reduce_gradients(), is about to return: callback(record). An exception leaves the call.
        self.returned: Event[[SyncRecord]] = Event()


# Of the process and not of a thread: the backward pass of a CUDA model runs in threads of its own.
_private_blocks: list[None] = []


@contextmanager
def private_forwards() -> Iterator[None]:
    """For the block, forward passes, operations and ``no_sync()`` blocks are no part of the user's step."""
    _private_blocks.append(None)
    try:
        yield
    finally:
        _private_blocks.pop()


def are_forwards_private() -> bool:
    """Whether a block of :func:`private_forwards` is open in this process."""
    return bool(_private_blocks)
