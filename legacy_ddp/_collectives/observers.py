"""Callbacks for the events of a wrapper or module."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec

import torch
from torch.utils.hooks import RemovableHandle

from legacy_ddp._record import SyncRecord

P = ParamSpec("P")


class Event(OrderedDict[int, Callable[P, object]], Generic[P]):
    """Callbacks of an event, by the id of the handle."""

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
