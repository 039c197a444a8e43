"""Assignment of windows to ranks and steps. The step alone decides, hence a resumed run continues correctly."""

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader

from legacy_ddp.data import GlobalBatchSampler

MicroBatch = tuple[int, torch.Tensor]  # its number among those of all ranks in the step, and its windows


def dealt(
    windows: torch.Tensor, first_step: int, *, batch_size: int, update_freq: int, seed: int, rank: int, world_size: int
) -> Iterator[list[MicroBatch]]:
    """The micro-batches of this rank, per step. Windows are dealt out in turn; grouping depends on the world size."""
    step = first_step
    while True:
        mine = global_batch(windows, step, batch_size * update_freq * world_size, seed)[rank::world_size]
        yield list(enumerate(mine.chunk(update_freq), start=rank * update_freq))
        step += 1


def global_batch(windows: torch.Tensor, step: int, batch_size: int, seed: int) -> torch.Tensor:
    """The windows of all ranks in a step."""
    epoch, index = divmod(step, len(windows) // batch_size)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed + epoch))
    return windows[order[index * batch_size : (index + 1) * batch_size]]


def shared_out(windows: torch.Tensor, first_step: int, sampler: GlobalBatchSampler) -> Iterator[list[MicroBatch]]:
    """The micro-batches of this rank, per step. The grouping of windows does not depend on the world size."""
    sampler.load_state_dict(sampler.state_dict(global_step=first_step))
    loader = DataLoader(windows, batch_sampler=sampler)  # type: ignore[arg-type]  # it asks no more of a dataset
    while True:
        batches = iter(loader)
        while micro_batches := [(number, batch) for number, batch in zip(sampler.micro_batches, batches, strict=False)]:
            yield micro_batches
