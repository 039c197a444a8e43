"""GradScalers found by their steps: which are in use, and whether one has unscaled the gradients of its optimizer."""

import weakref
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from legacy_ddp import _torch as internals

# Of each optimizer the scaler of its last step. Weak references: neither stays alive here.
_scalers: "weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[torch.amp.GradScaler]]" = (
    weakref.WeakKeyDictionary()
)
_known: "weakref.WeakValueDictionary[int, torch.amp.GradScaler]" = weakref.WeakValueDictionary()  # by id: any class


@cache
def watch_scalers() -> None:
    """Note the scaler of every step in this process from now on. Later calls do nothing."""
    register_optimizer_step_pre_hook(_note_scaler)


@internals.disable_dynamo
def _note_scaler(optimizer: torch.optim.Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    scaler = internals.calling_scaler()
    if scaler is not None:
        _scalers[optimizer] = weakref.ref(scaler)
        _known[id(scaler)] = scaler


def used_scaler(*, search: bool) -> torch.amp.GradScaler | None:
    """The GradScaler that has scaled a loss; of several the one with the largest scale.

    Of the scalers that have stepped an optimizer, or with ``search`` of all scalers in this process: an overflow may
    come before the first step, and then the scaler skips it. A search finds scalers for all later calls, too.
    """
    if search:
        _known.update({id(scaler): scaler for scaler in internals.all_scalers()})
    return internals.largest_used_scaler(list(_known.values()))


def unscaled_ids() -> set[int]:
    """The ids of all parameters with a gradient that a scaler has unscaled, where the step has not come yet.

    Known from the second step of an optimizer on.
    """
    ids: set[int] = set()
    for reference in _scalers.keyrefs():  # a list: a step in another thread may add an optimizer meanwhile
        optimizer = reference()
        scaler = None if optimizer is None else _scalers[optimizer]()
        if optimizer is not None and scaler is not None and internals.has_unscaled(scaler, optimizer):
            ids.update(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return ids
