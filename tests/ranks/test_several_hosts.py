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
from tests.helpers.processes import leave_open_files
from tests.helpers.rank_faults import counting
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import error_of, step
from tests.helpers.tiers import thorough

Said = tuple[str, str] | None
NUMEL = 2000
pytestmark = pytest.mark.parametrize("transport", ["host"], indirect=True)


def _model(rank: int, hosts: str, **arguments: Any) -> LegacyDistributedDataParallel:
    with on_host(hosts[rank]):
        return LegacyDistributedDataParallel(nn.Linear(NUMEL, 1, bias=False), **arguments)


def _line(model: LegacyDistributedDataParallel) -> str:
    (line,) = [text for text in repr(model).splitlines() if "transport:" in text]
    return line.strip()


class _Kept(logging.Handler):
    """Keeps the lines about a transport."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += [record.getMessage()] if "transport" in record.msg else []


def _chosen(rank: int, hosts: str, reproducible: bool = False) -> tuple[str, float, str, str, list[str]]:
    """The transport, the mean, what ``print(model)`` says before and after the first call, and the log."""
    kept, logger = _Kept(), logging.getLogger("legacy_ddp")
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        model = _model(rank, hosts, reproducible=reproducible)
        before = _line(model)
        values = []
        for _ in range(2):
            model.module.weight.grad = torch.full((1, NUMEL), 1.0 + rank)
            record = model.all_reduce(sample_size=1)
            values.append(float(model.module.weight.grad.unique()))
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)
    (value,) = set(values)
    return record.transport, value, before, _line(model), kept.lines


FROM_FIRST_CALL = "transport: host (from the first call on)"


@pytest.mark.parametrize("hosts, text", [thorough("aabb", "2 hosts of 2 ranks"), ("abcabc", "3 hosts of 2 ranks")])
def test_hosts_of_equal_numbers_of_ranks_share_memory_and_say_so(transport: str, hosts: str, text: str) -> None:
    line = f"transport: host ({text}, gloo between them)"
    mean = (1 + len(hosts)) / 2

    assert run_ranks(_chosen, len(hosts), hosts) == [("host", mean, FROM_FIRST_CALL, line, [line])] * len(hosts)


@pytest.mark.parametrize(
    "hosts, reason",
    [
        ("aab", "ranks 0 and 2: they run on different hosts, with unequal numbers of ranks, 1 to 2"),
        ("ab", "ranks 0 and 1: they run on different hosts, with one rank each"),
    ],
)
def test_other_hosts_use_gloo_alone_and_say_why(transport: str, hosts: str, reason: str) -> None:
    line = f"transport: gloo ({reason})"
    mean = (1 + len(hosts)) / 2

    assert run_ranks(_chosen, len(hosts), hosts) == [("gloo", mean, line, line, [line])] * len(hosts)


@pytest.mark.parametrize(
    "hosts, reason",
    [
        ("abab", "ranks 0 and 2 of a host are not consecutive"),
        thorough("aabcbc", "ranks 2 and 4 of a host are not consecutive"),
        ("aaabbb", "3 ranks on each host, which is no power of two"),
    ],
)
def test_hosts_that_are_no_nodes_of_the_tree_use_gloo_for_reproducible_sums_and_say_why(
    transport: str, hosts: str, reason: str
) -> None:
    """Of ``aabcbc`` rank 0 has a neighbour, and still knows of the other hosts."""
    line = f"transport: gloo (reproducible=True: {reason})"
    mean = (1 + len(hosts)) / 2

    assert run_ranks(_chosen, len(hosts), hosts, True) == [("gloo", mean, line, line, [line])] * len(hosts)


def _asked(rank: int, hosts: str) -> tuple[str, Said]:
    said = error_of(_model, rank, hosts, transport="host")
    return "" if said else "made", said


def test_the_host_transport_may_be_asked_for_on_equal_hosts_alone(transport: str) -> None:
    assert run_ranks(_asked, 4, "abab") == [("made", None)] * 4
    for _, said in run_ranks(_asked, 3, "abb"):
        assert said is not None
        assert said[0] == "TransportError"
        assert 'transport="host" is not possible: ranks 0 and 1: they run on different hosts' in said[1]


def _with_settings(rank: int) -> list[tuple[str, float]]:
    """What gloo alone carries on several hosts."""
    seen = []
    for arguments in ({"transport": "gloo"}, {"hook": True}):
        hooked = arguments.pop("hook", False)
        model = _model(rank, "aabb", **arguments)
        if hooked:
            model.register_comm_hook(None, mean)
        model.module.weight.grad = torch.full((1, NUMEL), 1.0 + rank)
        record = model.all_reduce(sample_size=1)
        seen.append((record.transport, float(model.module.weight.grad.unique())))
    sparse = nn.Embedding(4, 2, sparse=True)
    model = LegacyDistributedDataParallel(sparse)
    model(torch.tensor([rank])).sum().backward()
    record = model.all_reduce()
    seen.append((record.transport, float(sparse.weight.grad.to_dense().sum())))
    return seen


def test_gloo_carries_what_is_no_plain_dense_sum(transport: str) -> None:
    expected = [("gloo", 2.5)] * 2
    for seen in run_ranks(_with_settings, 4):
        assert seen[:2] == expected
        assert seen[2][1] == 2.0


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
    return record.transport, value, _line(model)


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
        seen.append((_line(model), mean))
    del kept
    return seen, logged_warnings.take()


def test_a_segment_that_one_host_cannot_map_later_is_gloo_on_all_hosts_with_one_warning(transport: str) -> None:
    reason = "rank 3: no shared memory (the limit of open files of this process is reached; raise it with ulimit -n)"
    for seen, warnings in run_ranks(_fails_later, 4, fresh=True):
        assert seen == [(f"transport: gloo ({reason})", 2.5)] * 2
        (text,) = warnings
        assert reason in text


def _on_subgroups(rank: int) -> tuple[list[str], list[float | None]]:
    """A group on one host, a group of one rank per host, and the whole."""
    hosts = "aabb"
    members = [(0, 1), (2, 3), (0, 2), (1, 3)]
    made = {ranks: dist.new_group(list(ranks)) for ranks in members}
    transports, means = [], []
    for ranks, group in made.items():
        if rank in ranks:
            model = _model(rank, hosts, process_group=group)
            means.append(step(model, float(rank)))
            transports.append(model.all_reduce().transport)
    model = _model(rank, hosts)
    means.append(step(model, float(rank)))
    transports.append(model.all_reduce().transport)
    return transports, means


def test_every_group_has_hosts_of_its_own(transport: str) -> None:
    seen = run_ranks(_on_subgroups, 4)

    assert [transports for transports, _ in seen] == [["host", "gloo", "host"]] * 4
    assert [means for _, means in seen] == [[0.5, 1.0, 1.5], [0.5, 2.0, 1.5], [2.5, 1.0, 1.5], [2.5, 2.0, 1.5]]


def _exchanges(rank: int) -> list[int]:
    """How often segments were exchanged until the end of each step; rank 3 keeps the gradient of step 2."""
    with counting("map_new") as count:
        model = _model(rank, "aabb")
        counts, kept = [], []
        for number in range(6):
            step(model, 1.0 + rank)
            counts += count
            kept += [model.module.weight.grad] if (rank, number) == (3, 2) else []
    return counts


def test_segments_are_exchanged_on_all_hosts_in_the_calls_in_which_one_rank_has_new_memory(transport: str) -> None:
    assert run_ranks(_exchanges, 4) == [[1, 1, 1, 2, 2, 2]] * 4
