"""Set-up of a rank under torchrun, and checks for agreement of ranks. Copy the functions that you need."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp.debug import check_replicas

T = TypeVar("T")


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Collective: join the ranks that torchrun started; a world of one without torchrun. Yields this rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size:
        backend, device = "nccl", torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        backend, device = "gloo", torch.device("cpu")
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def gather(value: T) -> list[T]:
    """Collective: the values of all ranks, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def exit_together(message: str) -> NoReturn:
    """Collective: rank 0 prints the reason, then every rank exits with status 1."""
    if dist.get_rank() == 0:
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    dist.barrier()  # torchrun ends all ranks as soon as one has left: rank 0 must have spoken by then
    sys.exit(1)


def require_equal_settings(settings: dict[str, Any]) -> None:
    """Collective: exit on every rank if the settings differ between ranks."""
    every = gather(settings)
    for name in settings:
        values = [of_rank[name] for of_rank in every]
        if any(value != values[0] for value in values):
            exit_together(f"{name} differs between ranks: got {values} on ranks 0 to {len(values) - 1}, expected one")


def require_identical_replicas(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Collective: exit on every rank unless all ranks hold the same bits."""
    report = check_replicas(model, optimizer)
    if not report.identical:
        exit_together(str(report))


def gather_random_states(device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Collective: the states of the random generators of each rank, which dropout uses."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return gather(state)


def restore_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
