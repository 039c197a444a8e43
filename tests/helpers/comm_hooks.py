"""Communication hooks as a user might write them."""

from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


def mean(state: Any, bucket: Any) -> "torch.futures.Future[torch.Tensor]":
    return default_hooks.allreduce_hook(None, bucket)


def at_once(tensor: Any) -> "torch.futures.Future[Any]":
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensor)
    return future
