"""A rank that hangs inside of ``run`` is named, with its line."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, SyncTimeoutError
from legacy_ddp.debug import cross_check
from tests.helpers.cross_faults import Net, batch_of, loss_of
from tests.helpers.ranks import run_ranks

_HANGING = 2


def _wait_for(paths: list[Path]) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(0.05)


def _hang(rank: int, folder: Path) -> str:
    model = LegacyDistributedDataParallel(Net(nn.Tanh()), timeout_seconds=3.0)
    told = [folder / str(other) for other in range(3) if other != _HANGING]

    def run(model: nn.Module, batch: Any) -> torch.Tensor:
        if rank == _HANGING:
            _wait_for(told)
        return loss_of(model, batch)

    with pytest.raises(Exception) as caught:  # noqa: PT011 - its type is checked below
        cross_check(model, run, batch_of(rank))
    if rank == _HANGING:
        return ""
    assert isinstance(caught.value, SyncTimeoutError)
    assert caught.value.ranks == (_HANGING,)
    (folder / str(rank)).touch()
    return str(caught.value)


def test_a_rank_that_hangs_inside_run_is_named_with_its_line(tmp_path: Path) -> None:
    texts = run_ranks(_hang, 3, tmp_path, fresh=True)

    for text in texts[:_HANGING]:
        words = " ".join(text.split())
        assert f"missing rank {_HANGING} (cross_check() call 1: run, at cross_check/test_hang.py:" in words
        assert "in _wait_for" in words
        assert f"stack of rank {_HANGING}, innermost last:" in words
        assert "look at the network" not in words
