"""Does a run that torch's and torchdata's tools saved go on to the same bits, here and under torch DDP?"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

from tests.helpers.besides_ddp import Side, State, batches, loss_of, net, weights
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import thorough

STOP = 3  # the step after which a run is saved


def _train(side: Side, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: slice) -> None:
    for batch in batches(rank)[steps]:
        side.backward(model, loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


def _start(side: Side, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = side.wrap(net())
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _save(rank: int, side: Side, folder: Path) -> State:
    """Train on, and save in between with torch.distributed.checkpoint; the weights of the end."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = _start(side, 0)
    _train(side, rank, model, optimizer, slice(STOP))
    weights_, moments = get_state_dict(model.module, optimizer)
    dcp.save({"model": weights_, "optimizer": moments}, checkpoint_id=folder)
    _train(side, rank, model, optimizer, slice(STOP, None))
    return weights(model)


def _load(rank: int, side: Side, folder: Path) -> State:
    """Other weights, the checkpoint in their place, and the rest of the steps."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = _start(side, 1)
    weights_, moments = get_state_dict(model.module, optimizer)
    dcp.load({"model": weights_, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model.module, optimizer, model_state_dict=weights_, optim_state_dict=moments)
    _train(side, rank, model, optimizer, slice(STOP, None))
    return weights(model)


OURS, DDP = Side(ours=True), Side(ours=False)


@pytest.mark.parametrize("saved, loaded", [thorough(OURS, DDP), (DDP, OURS)], ids=["to DDP", "from DDP"])
def test_a_distributed_checkpoint_of_the_module_goes_on_to_the_same_bits(
    saved: Side, loaded: Side, tmp_path: Path
) -> None:
    expected = run_ranks(_save, 2, saved, tmp_path)

    for whole, resumed in zip(expected, run_ranks(_load, 2, loaded, tmp_path), strict=True):
        for name, weight in whole.items():
            assert torch.equal(resumed[name], weight), name


def _loader(rank: int) -> Any:
    """With a generator of its own: iterating draws a seed, which would move the random numbers of dropout."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)  # which torchdata calls
    words = TensorDataset(torch.arange(40))
    sampler: DistributedSampler[Any] = DistributedSampler(words, num_replicas=2, rank=rank, seed=5)
    sampler.set_epoch(2)
    return StatefulDataLoader(words, batch_size=4, sampler=sampler, generator=torch.Generator().manual_seed(rank))


def _words(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = OURS.wrap(nn.Sequential(nn.Embedding(40, 6), nn.Dropout(0.5), nn.Linear(6, 1)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _read(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, stop: int | None = None) -> list[list[int]]:
    """What was read until the epoch ends, or step ``stop``."""
    read = []
    for (batch,) in loader:
        OURS.backward(model, model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        read.append(batch.tolist())
        if len(read) == stop:
            break
    return read


def _epoch(rank: int, stop: int | None) -> tuple[State, list[list[int]]]:
    """The weights after an epoch, interrupted after ``stop`` steps or not, and what was read in it."""
    model, optimizer = _words(0)
    loader = _loader(rank)
    torch.manual_seed(10 + rank)
    read = _read(model, optimizer, loader, stop)
    if stop is not None:
        saved = model.state_dict(), optimizer.state_dict(), loader.state_dict(), torch.get_rng_state()
        model, optimizer = _words(1)
        loader = _loader(rank)
        for thing, state in zip((model, optimizer, loader), saved, strict=False):
            thing.load_state_dict(state)
        torch.set_rng_state(saved[3])
        read += _read(model, optimizer, loader)
    return weights(model), read


def test_an_epoch_resumed_in_its_middle_reads_on_and_ends_with_the_same_bits() -> None:
    pytest.importorskip("torchdata", reason="the loader that knows where it stands is torchdata's")
    whole, resumed = (run_ranks(_epoch, 2, stop) for stop in (None, STOP))

    assert sorted(word for _, read in whole for batch in read for word in batch) == list(range(40))
    for (expected, read), (found, read_again) in zip(whole, resumed, strict=True):
        assert read_again == read
        for name, weight in expected.items():
            assert torch.equal(found[name], weight), name
