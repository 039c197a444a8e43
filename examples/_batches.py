"""Which windows does a rank read in which step? It follows from the step alone, so a resumed run finds its place."""

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader

from legacy_ddp.data import GlobalBatchSampler

MicroBatch = tuple[int, torch.Tensor]  # its number among those of all ranks in the step, and its windows


def dealt(
    windows: torch.Tensor, first_step: int, *, batch_size: int, update_freq: int, seed: int, rank: int, world_size: int
) -> Iterator[list[MicroBatch]]:
    """Per step, this rank's micro-batches. Windows are dealt out in turn: which ones meet depends on the world size."""
    step = first_step
    while True:
        mine = global_batch(windows, step, batch_size * update_freq * world_size, seed)[rank::world_size]
        yield list(enumerate(mine.chunk(update_freq), start=rank * update_freq))
        step += 1


def global_batch(windows: torch.Tensor, step: int, batch_size: int, seed: int) -> torch.Tensor:
    """The windows that all ranks read in a step."""
    epoch, index = divmod(step, len(windows) // batch_size)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed + epoch))
    return windows[order[index * batch_size : (index + 1) * batch_size]]


def shared_out(windows: torch.Tensor, first_step: int, sampler: GlobalBatchSampler) -> Iterator[list[MicroBatch]]:
    """Per step, this rank's micro-batches: each is the same windows on whatever rank it is."""
    sampler.load_state_dict(sampler.state_dict(global_step=first_step))
    loader = DataLoader(windows, batch_sampler=sampler)  # type: ignore[arg-type]  # it asks no more of a dataset
    while True:
        batches = iter(loader)
        while micro_batches := [(number, batch) for number, batch in zip(sampler.micro_batches, batches, strict=False)]:
            yield micro_batches
