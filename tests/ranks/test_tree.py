"""The tree of stars over several hosts: rows of all ranks, connections that do not grow, and lost ranks.

The ranks claim to run on the hosts in ``hosts``, a letter per rank.
"""

import os
import resource
import time
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.helpers.hosts import arriving_in_order, hubs_below_a_hub, on_host
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import add_gradients, step, wrap
from tests.helpers.tiers import choose, thorough

pytestmark = pytest.mark.parametrize("transport", ["host"], indirect=True)


def _rows(rank: int, hosts: str, arity: int) -> tuple[float | None, list[int | None]]:
    """The mean, and the sample sizes of the ranks in their order."""
    with on_host(hosts[rank]), hubs_below_a_hub(arity):
        model = wrap()
    mean = step(model, float(rank))
    model.zero_grad()
    add_gradients(model, 1.0)
    record = model.all_reduce(sample_size=rank + 1)
    return mean, [row.sample_size for row in record.rows]


@pytest.mark.parametrize(
    "hosts, arity", [("abbbcccc", 32), ("abab", 1), thorough("abcdefgh", 2), thorough("aabbccdd", 1)]
)
def test_rows_come_in_rank_order_over_hosts_of_any_numbers_of_ranks(transport: str, hosts: str, arity: int) -> None:
    """``arity``: hubs below a hub; with 1 the hubs are a chain."""
    size = len(hosts)

    assert run_ranks(_rows, size, hosts, arity) == [((size - 1) / 2, list(range(1, size + 1)))] * size


def _late(rank: int, hosts: str, late_seconds: float) -> list[float | None]:
    """The means of calls, to each of which another rank comes late."""
    with on_host(hosts[rank]), arriving_in_order(arity=2):
        model = wrap()
    means = [step(model, 0.0)]
    for late in range(len(hosts)):
        if rank == late:
            time.sleep(late_seconds)
        means.append(step(model, float(rank + late)))
    return means


@pytest.mark.parametrize("late_seconds", choose([0.1, 1.0, 10.0], [0.1]))
def test_a_late_rank_in_any_place_of_the_tree_is_no_error(transport: str, late_seconds: float) -> None:
    """The root, inner hubs, a hub and the leaves, one after the other."""
    hosts = "aabbccdd"

    means = run_ranks(_late, len(hosts), hosts, late_seconds, timeout_seconds=60.0 + 10 * late_seconds)

    assert means == [[0.0, *(3.5 + late for late in range(8))]] * 8


def _with_many_files(rank: int) -> float | None:
    """The mean of a call between two hosts, in a process with 1,100 open files."""
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with on_host("ab"[rank]):
            return step(wrap(), float(rank))
    finally:
        for each in files:
            os.close(each)


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200, reason="needs a limit of 1,200 open files")
def test_hubs_connect_in_processes_with_more_than_1024_open_files(transport: str) -> None:
    """select() raised ValueError: filedescriptor out of range."""
    assert run_ranks(_with_many_files, 2, fresh=True) == [0.5, 0.5]


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


def _store_operations(rank: int) -> int:
    """The number of operations of this rank in the first meeting of ranks on four hosts. Polls are left out: their
    number depends on the time."""
    done: list[tuple[object, ...]] = []

    def counted(name: str) -> Callable[..., Any]:
        method = getattr(dist.PrefixStore, name)

        def call(store: dist.PrefixStore, *arguments: Any) -> Any:
            done.extend([(name, *arguments)] if arguments != ("arrivals", 0) else [])
            return method(store, *arguments)

        return call

    names = ("add", "set", "get")
    with on_host("abcd"[rank % 4]), patch.multiple(dist.PrefixStore, **{name: counted(name) for name in names}):
        wrap()
    return len(done)


def test_the_store_operations_of_a_rank_do_not_grow_with_the_ranks(transport: str) -> None:
    """A rank read a key of every other rank. All ranks count their begin, their host and their arrival, and set a key.

    A leaf gets the place of its hub. A hub sets its place, counts itself, reads three counters, and sets the place for
    other hubs, or gets the place of the hub above."""
    leaf, hub = 4 + 1, 4 + 2 + 3 + 1

    assert run_ranks(_store_operations, 4) == [hub] * 4
    assert sorted(run_ranks(_store_operations, 16)) == [leaf] * 12 + [hub] * 4
