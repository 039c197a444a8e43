"""Ranks of the tree of stars that are lost: the root, an inner hub, a hub and a leaf, on several claimed hosts.

The ranks arrive in their order at the first meeting. So the lowest rank of each host is its hub, and rank 0 the root.
"""

import os
import re
import signal
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel, LostPeerError
from tests.helpers.hosts import arriving_in_order, on_host
from tests.helpers.rank_faults import do_when
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import step, wrap
from tests.helpers.tiers import thorough

pytestmark = pytest.mark.parametrize("transport", ["host"], indirect=True)

# As it enters this function in a call, a rank of a tree: has sent nothing, sends its row (the root: all rows), waits
# for all rows (the root never), has all rows.
PHASES = {"before": "_meet", "up": "_send_piece", "down": "_receive", "behind": "is_equal"}


def _wrap(rank: int, hosts: str, arity: int, **arguments: Any) -> LegacyDistributedDataParallel:
    with on_host(hosts[rank]), arriving_in_order(arity):
        return wrap(**arguments)


def _step_twice(model: LegacyDistributedDataParallel) -> None:
    """A rank may end the first call with success before another rank is lost in it."""
    step(model, 1.0)
    step(model, 1.0)


Seen = tuple[str, tuple[int, ...], str]


def _lost(rank: int, hosts: str, arity: int, victim: int, phase: str, number: int, checks: str) -> Seen | None:
    """Rank ``victim`` gets a signal in ``phase`` of the header exchange of its third call."""
    seconds = 3.0 if number == signal.SIGSTOP else 30.0
    model = _wrap(rank, hosts, arity, checks=checks, timeout_seconds=seconds)
    for _ in range(2):
        step(model, 1.0)
    if rank == victim:
        sys.setprofile(do_when(PHASES[phase], partial(os.kill, os.getpid(), number)))
    with pytest.raises(LostPeerError) as caught:
        _step_twice(model)
    return type(caught.value).__name__, caught.value.ranks, str(caught.value)


ONE_EACH, FOUR_EACH, TWO_EACH, UNEQUAL = "ab", "aaaabbbb", "aabbccdd", "abbbcccc"
_KILL, _STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.slow
@pytest.mark.parametrize(
    "hosts, arity, victim, phase, number, checks",
    [
        # one rank each: the root, and a hub
        (ONE_EACH, 32, 0, "before", _KILL, "off"),
        (ONE_EACH, 32, 1, "up", _KILL, "off"),
        thorough(ONE_EACH, 32, 0, "up", _STOP, "off"),
        # four each: a hub, and a leaf of the root
        thorough(FOUR_EACH, 32, 4, "down", _KILL, "off"),
        thorough(FOUR_EACH, 32, 1, "behind", _KILL, "info"),
        # two each: the root, an inner hub, a hub below it, a leaf below both
        (TWO_EACH, 2, 2, "up", _KILL, "off"),
        thorough(TWO_EACH, 2, 6, "before", _KILL, "off"),
        (TWO_EACH, 2, 7, "down", _KILL, "info"),
        (TWO_EACH, 2, 2, "up", _STOP, "info"),
        thorough(TWO_EACH, 2, 2, "down", _STOP, "off"),
        thorough(TWO_EACH, 2, 7, "behind", _STOP, "info"),
        # 1 + 3 + 4: the root, an inner hub, a hub below it, and leaves of both
        thorough(UNEQUAL, 1, 0, "before", _KILL, "off"),
        thorough(UNEQUAL, 1, 1, "down", _KILL, "off"),
        thorough(UNEQUAL, 1, 2, "up", _KILL, "off"),
        thorough(UNEQUAL, 1, 7, "behind", _KILL, "off"),
        thorough(UNEQUAL, 1, 4, "down", _STOP, "off"),
    ],
)
def test_every_survivor_of_a_lost_rank_of_the_tree_has_an_error_without_a_wrong_name(
    transport: str, hosts: str, arity: int, victim: int, phase: str, number: int, checks: str
) -> None:
    seen = run_ranks(_lost, len(hosts), hosts, arity, victim, phase, number, checks, lost=(victim,))

    assert [rank for rank, found in enumerate(seen) if found is None] == [victim]
    for kind, ranks, text in filter(None, seen):
        assert kind == ("SyncTimeoutError" if number == signal.SIGSTOP else "PeerLostError"), text
        assert ranks == (() if checks == "off" else (victim,)), text
        if checks == "off":
            named = set(re.findall(r"connection to rank (\d+) lost", text))
            # Where gloo has not begun, every survivor is told the rank.
            assert named == {str(victim)} if (phase, number) == ("before", _KILL) else named <= {str(victim)}, text


def _lost_in_the_meeting(rank: int, hosts: str, arity: int, victim: int, function: str, number: int) -> Seen | None:
    if rank == victim:
        sys.setprofile(do_when(function, partial(os.kill, os.getpid(), number)))
    with pytest.raises(LegacyDDPError) as caught:
        _wrap(rank, hosts, arity, timeout_seconds=3.0 if number == _STOP else 30.0)
    return type(caught.value).__name__, caught.value.ranks, str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim, function, number",
    [
        (0, "introduce", _KILL),
        thorough(2, "introduce", _KILL),
        (7, "introduce", _KILL),
        thorough(0, "_make_star", _KILL),
        (2, "_make_star", _KILL),
        *(thorough(*place, _STOP) for place in ((0, "introduce"), (2, "_make_star"))),
    ],
)
def test_a_rank_lost_as_the_tree_connects_is_an_error_on_all_without_a_wrong_name(
    transport: str, victim: int, function: str, number: int
) -> None:
    seen = run_ranks(_lost_in_the_meeting, 8, TWO_EACH, 2, victim, function, number, lost=(victim,))

    assert [rank for rank, found in enumerate(seen) if found is None] == [victim]
    for kind, ranks, text in filter(None, seen):
        assert kind in (("PeerLostError",) if number == _KILL else ("PeerLostError", "SyncTimeoutError"))
        assert set(ranks) <= {victim}
        assert set(re.findall(r"connection to rank (\d+) lost", text)) <= {str(victim)}


def _gloo_fails_on_rank_1(rank: int) -> str:
    model = wrap(transport="gloo", checks="off", timeout_seconds=30.0)
    step(model, 1.0)
    ended = patch.multiple(
        dist.Work, wait=Mock(side_effect=RuntimeError("Connection closed by peer")), is_completed=lambda _: True
    )
    with ended if rank == 1 else nullcontext(), pytest.raises(LostPeerError) as caught:
        _step_twice(model)
    if rank == 1:  # the others see the end of gloo before their wait for it has looked at the tree
        dist.destroy_process_group()
    return str(caught.value)


def test_a_rank_that_leaves_for_an_error_of_gloo_is_not_called_lost_by_the_others(transport: str) -> None:
    """Its connections of the tree ended without a notice, and with checks off nobody asks it."""
    seen = run_ranks(_gloo_fails_on_rank_1, 3, fresh=True)

    assert "Connection closed by peer" in seen[1]
    for rank in (0, 2):
        assert "connection to rank" not in seen[rank]
        assert "rank 1 left because another rank was lost" in seen[rank]
