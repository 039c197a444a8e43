"""An exception at any bytecode of a call on one of two ranks, as from the handler of a signal.

Afterwards the ranks go on with right gradients, or both know at once that their group is lost. None waits for its
timeout.
"""

import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, LostPeerError
from legacy_ddp import _torch as internals
from legacy_ddp._call.all_reduce import all_reduce
from legacy_ddp._call.state import Synchronizer
from legacy_ddp._interrupts import OwnedLock, has_left
from legacy_ddp._ranks import private_groups
from legacy_ddp._ranks.call import Call
from legacy_ddp._replicas.rotation import RotatingDigests
from legacy_ddp._watchdog import Watchdog
from tests.helpers.interrupts import Injection
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import count, thorough

_FUNCTIONS = (
    *(Call.__enter__, Call.__exit__, Call._take_over, Call._end_call),
    *(has_left, OwnedLock.take, OwnedLock.release, Watchdog.begin, Watchdog.end),
    *(all_reduce, internals.keeps_grad_mode, Synchronizer.call, private_groups.groups_of),
    *(RotatingDigests._find_parts, RotatingDigests.begin),
)
_CALLS = 3  # after the calls without an exception


class _Training:
    """Two ranks with a group of their own, because an exception may cost it."""

    def __init__(self, rank: int, calls: int) -> None:
        self.group = dist.new_group([0, 1])
        self.model = LegacyDistributedDataParallel(
            nn.Linear(2, 1, bias=False), process_group=self.group, timeout_seconds=60.0
        )
        self.items = torch.tensor([[1.0 + rank, 4.0 - rank]])
        self.calls = calls
        for _ in range(calls):
            assert self.call() == "right"

    def call(self) -> str:
        """The result of a step without ``step()``: its error, or whether its gradient is the mean of both ranks."""
        self.model.zero_grad()
        try:
            self.model(self.items).sum().backward()
            self.calls = self.model.all_reduce().call
        except Exception as error:  # noqa: BLE001 - compared below
            return type(error).__name__
        return "right" if self.model.module.weight.grad.tolist() == [[1.5, 3.5]] else "wrong"


def _outcomes(training: _Training, first: list[str]) -> list[str]:
    """Call until the ranks have made some calls, or have lost their group; as a script that catches every error."""
    last, found = training.calls - (first == ["right"]) + _CALLS, list(first)
    while training.calls < last and found[-2:] != ["LostPeerError"] * 2 and len(found) < 10:
        found.append(training.call())
    return found


def _play(rank: int, calls: int, stride: int) -> list[tuple[str, list[list[str]]]]:
    """For each place of an exception on rank 1: the results of both ranks."""
    played = []
    for number in itertools.count(0, stride):
        training, place, first = _Training(rank, calls), "", []
        if rank == 1:
            with Injection(_FUNCTIONS, number) as injection:
                first = [training.call()]
            place = injection.place
            assert torch.is_grad_enabled(), place
        outcomes: list[object] = [None, None]
        dist.all_gather_object(outcomes, (place, _outcomes(training, first)))
        dist.destroy_process_group(training.group)
        del training
        gc.collect()
        (_, of_first), (place, of_second) = outcomes
        if not place:
            return played
        played.append((place, [of_first, of_second]))
    raise AssertionError


@pytest.mark.slow
@pytest.mark.cpu("the call is the same on a device")
@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("calls, stride", [(2, 89), thorough(2, count(1, 7)), thorough(0, count(7, 61))])
def test_an_exception_anywhere_in_a_call_leaves_right_gradients_or_a_group_that_both_ranks_know_to_be_lost(
    calls: int, stride: int
) -> None:
    # Abandoned operations of gloo may keep a process until their time is over.
    played, other = run_ranks(_play, 2, calls, stride, fresh=True, survivors_exit=False, timeout_seconds=3000.0)

    assert played == other
    assert len(played) > 5
    for place, results in played:
        for found in results:
            assert "wrong" not in found, place
            assert "SyncTimeoutError" not in found, place
        is_lost = [found[-1] == LostPeerError.__name__ for found in results]
        assert all(is_lost) or all(found[-1] == "right" for found in results), (place, results)
