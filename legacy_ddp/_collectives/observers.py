"""Who may look on while ranks meet? The core knows this much of a recorder, and nothing of its files."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from legacy_ddp._buckets.plan import Plan
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._record import SyncRecord
from legacy_ddp._transport.call import Call


class Observer(Protocol):
    """Sees the calls of one wrapper or module. Changes nothing, and communicates nothing."""

    def see_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward pass of the wrapper begins. Not called inside compiled code."""

    def see_local(self, grads: Mapping[str, torch.Tensor | None]) -> None:
        """A call begins, and these are what this rank brings. An exception here ends the call on all ranks."""

    def see_reduced(self, record: SyncRecord) -> None:
        """The call is over, and succeeded."""


def show_forward(observers: Sequence[Observer], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Let them see what a forward pass is given."""
    for observer in observers:
        observer.see_forward(args, kwargs)


def show_local(observers: Sequence[Observer], call: Call, plan: Plan, packed: Packed) -> None:
    """Let them see the gradients that this rank brings."""
    if observers:
        with call.phase("observe"):
            grads = dict(packed.grads(plan))
            for observer in observers:
                observer.see_local(grads)


def show_reduced(observers: Sequence[Observer], record: SyncRecord) -> None:
    """Let them see what a call left."""
    for observer in observers:
        observer.see_reduced(record)
