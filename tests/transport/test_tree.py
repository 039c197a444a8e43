"""The tree of stars over several hosts: rows of all ranks, connections that do not grow, and lost ranks.

The ranks claim to run on the hosts in ``hosts``, a letter per rank.
"""

import os
import signal
from collections import Counter
from statistics import median
from typing import Any

import pytest

from legacy_ddp import LostPeerError
from legacy_ddp._transport import first_meeting
from tests.helpers.hosts import on_host
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import add_gradients, step, wrap
from tests.helpers.tiers import thorough

pytestmark = pytest.mark.parametrize("transport", ["host"], indirect=True)


def _rows(rank: int, hosts: str, arity: int) -> tuple[float | None, list[int | None]]:
    """The mean, and the sample sizes of the ranks in their order."""
    before, first_meeting.ARITY = first_meeting.ARITY, arity
    try:
        with on_host(hosts[rank]):
            model = wrap()
        mean = step(model, float(rank))
        model.zero_grad()
        add_gradients(model, 1.0)
        record = model.all_reduce(sample_size=rank + 1)
    finally:
        first_meeting.ARITY = before
    return mean, [row.sample_size for row in record.rows]


@pytest.mark.parametrize(
    "hosts, arity",
    [("abbbcccc", 32), ("abab", 1), thorough("abcdefgh", 2), thorough("aabbccdd", 1)],
)
def test_rows_come_in_rank_order_over_hosts_of_any_numbers_of_ranks(transport: str, hosts: str, arity: int) -> None:
    """``arity``: hubs below a hub; with 1 the hubs are a chain."""
    size = len(hosts)

    assert run_ranks(_rows, size, hosts, arity) == [((size - 1) / 2, list(range(1, size + 1)))] * size


def _opened(rank: int) -> int:
    """The descriptors that the library has opened in this rank, with gloo for the gradients."""
    before = len(os.listdir("/proc/self/fd"))
    model = wrap(transport="gloo")
    for _ in range(3):
        step(model, float(rank))
    return len(os.listdir("/proc/self/fd")) - before


def test_the_descriptors_of_a_rank_do_not_grow_with_the_ranks_but_on_the_hub(transport: str) -> None:
    """Two meshes of gloo had two more for each rank. A ring has one more or less, by the order of connecting."""
    four, eight = (sorted(run_ranks(_opened, size, fresh=True)) for size in (4, 8))

    assert abs(median(four) - median(eight)) <= 2
    assert eight[-2] - four[0] <= 3
    assert eight[-1] - four[0] <= 8  # the hub has seven connections of the tree, the other ranks one


def _store_operations(rank: int) -> dict[str, int]:
    counts = Counter[str]()
    meet = first_meeting._Meeting._read

    def read(self: Any, key: str, who: str) -> Any:
        counts["read"] += 1
        return meet(self, key, who)

    first_meeting._Meeting._read = read
    try:
        with on_host("abcd"[rank % 4]):
            wrap()
    finally:
        first_meeting._Meeting._read = meet
    return dict(counts)


def test_a_rank_reads_one_place_at_most_in_the_first_meeting(transport: str) -> None:
    for size in (4, 8):
        assert {sum(counts.values()) for counts in run_ranks(_store_operations, size)} <= {0, 1}


def _lost_on_hosts(rank: int, hosts: str, victim: int, checks: str) -> tuple[str, tuple[int, ...], str] | None:
    with on_host(hosts[rank]):
        model = wrap(checks=checks, timeout_seconds=30.0)
    step(model, 1.0)
    step(model, 1.0)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(LostPeerError) as caught:
        step(model, 1.0)
    return type(caught.value).__name__, caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("hosts", ["ab", "aabb", "abbbcccc"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_on_one_of_several_hosts_is_named_on_all(transport: str, hosts: str, victim: int) -> None:
    for found in filter(None, run_ranks(_lost_on_hosts, len(hosts), hosts, victim, "info", lost=(victim,))):
        assert found[:2] == ("PeerLostError", (victim,))


@pytest.mark.parametrize("hosts, victim", [("ab", 0), ("abbbcccc", 1), ("abbbcccc", 7)])
def test_without_checks_the_text_names_the_lost_rank_on_all_hosts(transport: str, hosts: str, victim: int) -> None:
    """gloo told the ranks that were connected to the lost rank, and the others another rank, or nothing."""
    for found in filter(None, run_ranks(_lost_on_hosts, len(hosts), hosts, victim, "off", lost=(victim,))):
        assert found[0] == "PeerLostError"
        assert f"connection to rank {victim} lost" in found[2]
