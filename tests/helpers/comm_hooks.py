"""Communication hooks as a user might write them, and what torch's own need to end well."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

_held: list[dist.ProcessGroup | None] = []


def hold_group() -> None:
    """Keep the default group until this process ends.

    PowerSGD's callbacks hold it, too, and are dropped on one of its threads, some time after the last call. If nothing
    else held it by then, that thread would have to wait for itself to end: "Resource deadlock avoided", and an abort.
    """
    _held.append(dist.group.WORLD)


def mean(state: Any, bucket: Any) -> "torch.futures.Future[torch.Tensor]":
    return default_hooks.allreduce_hook(None, bucket)


def at_once(tensor: Any) -> "torch.futures.Future[Any]":
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensor)
    return future
