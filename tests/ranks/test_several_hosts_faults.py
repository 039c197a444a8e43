"""Ranks lost on one of two hosts: an error on all ranks of both hosts that names the rank by its number in the group.

Ranks 0 and 2 claim to run on one host, ranks 1 and 3 on another: no number is the index on a host. With
``reproducible=True``, which needs consecutive ranks, ranks 0 and 1, and ranks 2 and 3. A PeerLostError comes before the
timeout of the call, a SyncTimeoutError at the timeout.
"""

import os
import signal
import sys
from functools import partial

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, LostPeerError
from tests.helpers.hosts import on_host
from tests.helpers.rank_faults import do_when, error_after_interrupt
from tests.helpers.ranks import run_ranks
from tests.helpers.small_sizes import sum_chunks_of
from tests.helpers.tiers import thorough

HOSTS, CONSECUTIVE = "abab", "aabb"
NUMEL = 20 * 64
pytestmark = pytest.mark.parametrize("transport", ["host"], indirect=True)


def _model(
    rank: int, *, checks: str = "info", timeout_seconds: float = 30.0, reproducible: bool = False
) -> LegacyDistributedDataParallel:
    sum_chunks_of(64)
    net = nn.Linear(NUMEL, 1, bias=False)
    options = {"checks": checks, "timeout_seconds": timeout_seconds, "reproducible": reproducible}
    with on_host(_hosts(reproducible)[rank]):
        return LegacyDistributedDataParallel(net, transport="host", buffer_size=192, **options)


def _hosts(reproducible: bool) -> str:
    return CONSECUTIVE if reproducible else HOSTS


def _step(model: LegacyDistributedDataParallel, value: float) -> float:
    weight = model.module.weight
    weight.grad = torch.full_like(weight, value)
    model.all_reduce(sample_size=1)
    return float(weight.grad.unique())


def _step_twice(model: LegacyDistributedDataParallel, value: float) -> None:
    """A host that lost no rank may end the first call with success."""
    _step(model, value)
    _step(model, value)


def _end(number: int) -> None:
    os.kill(os.getpid(), number)


Seen = tuple[str, tuple[int, ...], str | None, bool]


def _lost(
    rank: int, victim: int, function: str, count: int, number: int, checks: str = "info", reproducible: bool = False
) -> Seen | None:
    """Rank ``victim`` gets a signal as it enters ``function`` for the ``count``-th time in a call."""
    seconds = 3.0 if number == signal.SIGSTOP else 30.0
    model = _model(rank, checks=checks, timeout_seconds=seconds, reproducible=reproducible)
    for value in (1.0, 2.0, 3.0):
        _step(model, value)
    if rank == victim:
        sys.setprofile(do_when(function, partial(_end, number), nth=count + 1))
    with pytest.raises(LostPeerError) as caught:
        _step_twice(model, 1.0 + rank)
    error = caught.value
    return type(error).__name__, error.ranks, error.phase, model.module.weight.grad is None


@pytest.mark.parametrize(
    "victim, function, count, reproducible",
    [
        thorough(0, "total_of", 0, False),
        (1, "total_of", 4, False),
        thorough(2, "_start", 1, False),
        thorough(3, "give_out", 0, False),
        (1, "give_out", 5, False),
        thorough(3, "barrier", 0, False),
        thorough(1, "total_of", 4, True),
        (0, "reduce_own_shard", 1, True),
        thorough(2, "broadcast_result", 2, True),
        thorough(3, "give_out", 5, True),
    ],
)
def test_a_rank_killed_anywhere_in_the_payload_is_named_on_both_hosts(
    transport: str, victim: int, function: str, count: int, reproducible: bool
) -> None:
    seen = run_ranks(_lost, 4, victim, function, count, signal.SIGKILL, "info", reproducible, lost=(victim,))

    for rank, found in enumerate(seen):
        if found is not None:
            kind, ranks, phase, is_dropped = found
            assert (kind, ranks, is_dropped) == ("PeerLostError", (victim,), True)
            hosts = _hosts(reproducible)
            on_its_host = hosts[rank] == hosts[victim]
            assert phase == "payload" if on_its_host else phase in ("payload", "agree")


def test_a_rank_stopped_in_the_payload_is_named_on_both_hosts_after_the_timeout(transport: str) -> None:
    seen = run_ranks(_lost, 4, 3, "total_of", 2, signal.SIGSTOP, lost=(3,))

    for kind, ranks, phase, is_dropped in filter(None, seen):
        assert (kind, ranks, phase, is_dropped) == ("SyncTimeoutError", (3,), "payload", True)


@pytest.mark.parametrize("victim", [thorough(0), 3])
def test_without_checks_all_ranks_of_both_hosts_get_an_error_and_drop_their_gradients(
    transport: str, victim: int
) -> None:
    """No watchdog tells the lost rank: gloo shows the end of a connection, and ranks leave one after the other."""
    seen = run_ranks(_lost, 4, victim, "total_of", 1, signal.SIGKILL, "off", lost=(victim,))

    for kind, ranks, phase, is_dropped in filter(None, seen):
        assert (kind, ranks, phase, is_dropped) == ("PeerLostError", (), "payload", True)


def _interrupted(rank: int, function: str, reproducible: bool) -> tuple[str, bool]:
    model = _model(rank, reproducible=reproducible)
    _step(model, 1.0)
    name = error_after_interrupt(lambda: _step(model, 1.0 + rank), function, here=rank == 2)
    return name, model.module.weight.grad is None


@pytest.mark.parametrize(
    "function, reproducible",
    [
        ("settle", False),
        *(thorough(name, False) for name in ("_kept_works", "_start", "divide")),
        ("_poll", False),
        ("add_on_host", True),
        *(thorough(name, True) for name in ("_kept_works", "reduce_own_shard", "give_out")),
    ],
)
def test_an_interrupt_after_the_header_drops_every_gradient_on_both_hosts(
    transport: str, function: str, reproducible: bool
) -> None:
    """In ``_poll``, ``_divide`` and ``give_out`` the other host may have its result already."""
    seen = run_ranks(_interrupted, 4, function, reproducible, fresh=True)

    hosts = _hosts(reproducible)
    assert seen[2] == ("KeyboardInterrupt", True)
    for rank in (0, 1, 3):
        may_have_its_result = function in ("_poll", "divide", "give_out") and hosts[rank] != hosts[2]
        assert seen[rank] == ("PeerLostError", True) or (may_have_its_result and seen[rank] == ("", False))
