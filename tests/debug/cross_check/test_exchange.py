"""Batches on the way around the ring of ranks."""

import time
from typing import Any
from unittest import mock

import pytest
from torch import nn

from legacy_ddp.debug import cross_check
from legacy_ddp.debug._cross_check import trial
from legacy_ddp.debug._cross_check.trial import pass_on
from tests.helpers.cross_faults import Net, batch_of, loss_of
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import thorough

_LATE_SECONDS = 0.6  # more than the time between two looks at an operation under way


def _late(*args: Any) -> Any:
    time.sleep(_LATE_SECONDS)
    return pass_on(*args)


def _check(rank: int, late: int, without: int) -> bool:
    with mock.patch.object(trial, "pass_on", _late if rank == late else pass_on):
        return cross_check(Net(nn.Tanh()), loss_of, None if rank == without else batch_of(rank)).agrees


@pytest.mark.parametrize("size, late, without", [thorough(2, 0, 9), thorough(2, 1, 0), (3, 1, 9), (3, 2, 1)])
def test_a_rank_late_for_the_exchange_of_batches_breaks_no_connection(size: int, late: int, without: int) -> None:
    assert run_ranks(_check, size, late, without) == [True] * size
