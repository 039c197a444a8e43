"""The choice of a transport on several hosts, the same on all ranks; and calls in which one host has a fault.

The ranks claim to run on the hosts in ``hosts``, a letter per rank.
"""

import logging
import re
import resource
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroupGloo

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers import logged_warnings
from tests.helpers.comm_hooks import mean
from tests.helpers.host_sockets import refused
from tests.helpers.hosts import on_host
from tests.helpers.listening import hearing
from tests.helpers.processes import leave_open_files
from tests.helpers.rank_faults import counting
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.small_models import error_of, step, transport_line
from tests.helpers.tiers import thorough

Said = tuple[str, str] | None
NUMEL = 2000
pytestmark = pytest.mark.parametrize("transport", ["host"], indirect=True)


def _model(rank: int, hosts: str, **arguments: Any) -> LegacyDistributedDataParallel:
    with on_host(hosts[rank]):
        return LegacyDistributedDataParallel(nn.Linear(NUMEL, 1, bias=False), **arguments)


def _chosen(rank: int, hosts: str, reproducible: bool = False) -> tuple[str, float, str, str, list[str]]:
    """The transport, the mean, what ``print(model)`` says before and after the first call, and the log."""
    with hearing(logging.INFO) as heard:
        model = _model(rank, hosts, reproducible=reproducible)
        before = transport_line(model)
        values = set()
        for _ in range(2):
            model.module.weight.grad = torch.full((1, NUMEL), 1.0 + rank)
            record = model.all_reduce(sample_size=1)
            values |= {*model.module.weight.grad.flatten().tolist()}
    (value,) = values
    return (
        record.transport,
        value,
        before,
        transport_line(model),
        [line for line in heard if line.startswith("transport: ")],
    )


APART = "they run on different hosts, with"


@pytest.mark.parametrize(
    "hosts, reproducible, carrier, said",
    [
        thorough("aabb", False, "host", "2 hosts of 2 ranks, gloo between them"),
        ("abcabc", False, "host", "3 hosts of 2 ranks, gloo between them"),
        ("aab", False, "gloo", f"ranks 0 and 2: {APART} unequal numbers of ranks, 1 to 2"),
        ("ab", False, "gloo", f"ranks 0 and 1: {APART} one rank each"),
        ("abab", True, "gloo", "reproducible=True: ranks 0 and 2 of a host are not consecutive"),
        # Rank 0 has a neighbour, and still knows of the other hosts.
        thorough("aabcbc", True, "gloo", "reproducible=True: ranks 2 and 4 of a host are not consecutive"),
        ("aaabbb", True, "gloo", "reproducible=True: 3 ranks on each host, which is no power of two"),
    ],
)
def test_equal_hosts_share_memory_and_others_use_gloo_alone_and_all_say_why(
    transport: str, hosts: str, reproducible: bool, carrier: str, said: str
) -> None:
    line = f"transport: {carrier} ({said})"
    before = "transport: host (from the first call on)" if carrier == "host" else line
    expected = (carrier, (1 + len(hosts)) / 2, before, line, [line])

    assert run_ranks(_chosen, len(hosts), hosts, reproducible) == [expected] * len(hosts)


def _refused(rank: int) -> Said:
    return error_of(_model, rank, "abb", transport="host")


def test_the_host_transport_may_not_be_asked_for_on_unequal_hosts(transport: str) -> None:
    for said in run_ranks(_refused, 3):
        assert said is not None
        assert said[0] == "TransportError"
        assert 'transport="host" is not possible: ranks 0 and 1: they run on different hosts' in said[1]


def _call(model: LegacyDistributedDataParallel, rank: int) -> tuple[str, float]:
    model.module.weight.grad = torch.full((1, NUMEL), 1.0 + rank)
    record = model.all_reduce(sample_size=1)
    return record.transport, float(model.module.weight.grad.unique())


@pytest.mark.usefixtures("transport")
@on_ranks(4, [[("host", 2.5), ("gloo", 2.5), ("gloo", 2.5), 2.0]] * 4)
def test_gloo_carries_what_is_no_plain_dense_sum(rank: int) -> list[Any]:
    """Beside ``transport="host"``, which may be asked for on equal hosts: gloo, a hook, and sparse gradients."""
    group = dist.new_group()
    models = [_model(rank, "aabb", transport=asked, process_group=group) for asked in ("host", "gloo", "auto")]
    models[2].register_comm_hook(None, mean)
    sparse = nn.Embedding(4, 2, sparse=True)
    model = LegacyDistributedDataParallel(sparse, process_group=group)
    model(torch.tensor([rank])).sum().backward()
    model.all_reduce()
    return [*(_call(model, rank) for model in models), float(sparse.weight.grad.to_dense().sum())]


_SUBGROUPS = [["host 0.5", "gloo 1.0", "host 1.5"], ["host 0.5", "gloo 2.0", "host 1.5"]]
_SUBGROUPS += [["host 2.5", "gloo 1.0", "host 1.5"], ["host 2.5", "gloo 2.0", "host 1.5"]]


@pytest.mark.usefixtures("transport")
@on_ranks(4, _SUBGROUPS)
def test_every_group_has_hosts_of_its_own(rank: int) -> list[str]:
    """A group on one host, a group of one rank per host, and the whole."""
    groups = {ranks: dist.new_group(list(ranks)) for ranks in [(0, 1), (2, 3), (0, 2), (1, 3)]}
    seen = []
    for group in [*(group for ranks, group in groups.items() if rank in ranks), dist.new_group()]:
        model = _model(rank, "aabb", process_group=group)
        mean = step(model, float(rank))
        seen.append(f"{model.all_reduce().transport} {mean}")
    return seen


@pytest.mark.usefixtures("transport")
@on_ranks(4, [[1, 1, 1, 2, 2, 2]] * 4)
def test_segments_are_exchanged_on_all_hosts_in_the_calls_in_which_one_rank_has_new_memory(rank: int) -> list[int]:
    """How often segments were exchanged until the end of each step; rank 3 keeps the gradient of step 2."""
    with counting("map_new") as count:
        model = _model(rank, "aabb", process_group=dist.new_group())
        counts, kept = [], []
        for number in range(6):
            step(model, 1.0 + rank)
            counts += count
            kept += [model.module.weight.grad] if (rank, number) == (3, 2) else []
    return counts


def _cannot_connect(rank: int, fault: str) -> tuple[str, float | None, str]:
    """A rank of the second host cannot connect to its hub, or rank 3 not to the other host."""
    kept, all_reduce = list[Any](), ProcessGroupGloo.allreduce

    def fail(group: Any, *arguments: Any) -> Any:
        """The first exchange of a group of two: it is the group of the ranks of equal index."""
        work = all_reduce(group, *arguments)
        if group.size() == 4:
            return work
        kept.append((group, work.wait()))  # or the other rank fails by itself, because its connection ends
        raise RuntimeError("connectFullMesh failed")

    is_cut_off = rank in (2, 3) if fault == "star" else rank == 3
    cut = (
        refused("connect", OSError("no more sockets"))
        if fault == "star"
        else patch.object(ProcessGroupGloo, "allreduce", fail)
    )
    with cut if is_cut_off else nullcontext():
        model = _model(rank, "aabb")
        value = step(model, 1.0 + rank)
        record = model.all_reduce()
    return record.transport, value, transport_line(model)


@pytest.mark.parametrize(
    "fault, reason",
    [
        ("star", r"rank [23]: no connection on the host \(OSError: no more sockets\)"),
        ("between", r"rank 3: no connection between hosts \(RuntimeError: connectFullMesh failed\)"),
    ],
)
def test_where_a_rank_cannot_connect_all_hosts_use_gloo_alone(transport: str, fault: str, reason: str) -> None:
    results = run_ranks(_cannot_connect, 4, fault)

    assert results == [results[0]] * 4
    assert results[0][:2] == ("gloo", 2.5)
    assert re.fullmatch(rf"transport: gloo \({reason}\)", results[0][2])


def _fails_later(rank: int) -> tuple[list[tuple[str, float | None]], list[str]]:
    """Rank 2 needs a new segment in a later call, and rank 3 cannot map it."""
    model = _model(rank, "aabb")
    step(model, 1.0)
    kept = model.module.weight.grad if rank == 2 else None
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 3:
        leave_open_files(0)
    seen = []
    for _ in range(2):
        mean = step(model, 1.0 + rank)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        seen.append((transport_line(model), mean))
    del kept
    return seen, logged_warnings.take()


def test_a_segment_that_one_host_cannot_map_later_is_gloo_on_all_hosts_with_one_warning(transport: str) -> None:
    reason = "rank 3: no shared memory (the limit of open files of this process is reached; raise it with ulimit -n)"
    for seen, warnings in run_ranks(_fails_later, 4, fresh=True):
        assert seen == [(f"transport: gloo ({reason})", 2.5)] * 2
        (text,) = warnings
        assert reason in text
