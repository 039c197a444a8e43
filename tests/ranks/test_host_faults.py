"""Ranks that are lost while others write to their memory: no gradient half summed, no write to memory used again."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel as Wrapper
from legacy_ddp import LostPeerError
from tests.helpers.hosts import on_host
from tests.helpers.processes import slowness
from tests.helpers.rank_faults import do_when, error_after_interrupt
from tests.helpers.ranks import run_ranks
from tests.helpers.small_sizes import sum_chunks_of
from tests.helpers.tiers import thorough

CHUNK = 64
NUMEL = 20 * CHUNK


pytestmark = pytest.mark.parametrize("transport", ["host"], indirect=True)


def _model(rank: int, hosts: str = "aaaa", *, reproducible: bool = False, **options: Any) -> Wrapper:
    """``hosts``: a letter per rank for the host that it claims to run on."""
    sum_chunks_of(CHUNK)
    net = nn.Linear(NUMEL, 1, bias=False)
    options = {"timeout_seconds": 30.0, "buffer_size": 3 * CHUNK if "b" in hosts else 2**28, **options}
    with on_host(hosts[rank]):
        return Wrapper(net, transport="host", reproducible=reproducible, **options)


def _step(model: Wrapper, value: float) -> float:
    """With ``reproducible=True`` the value comes in two micro-batches, and their sum lies in memory of its own."""
    weight = model.module.weight
    if model._settings.reproducible:
        weight.grad = None
        for _ in range(2):
            with model.no_sync():
                weight.grad = torch.full_like(weight, value / 2)
    else:
        weight.grad = torch.full_like(weight, value)
    model.all_reduce(sample_size=1)
    return float(weight.grad.unique())


def _is_dropped(model: Wrapper) -> bool:
    """Whether the gradient is None, and no flat tensor and no sum of the failed call will be used again."""
    leaves, buffers = model._synchronizer.leaves, model._synchronizer.planner._known.buffers
    is_left = all(buffer._views is None for buffer in buffers) and (leaves is None or leaves.sums._sums == [])
    return is_left and model.module.weight.grad is None


def _step_twice(model: Wrapper, value: float) -> None:
    """A host that lost no rank may end the first call with success."""
    _step(model, value)
    _step(model, value)


Seen = tuple[str, tuple[int, ...], str | None, bool, float]


def _lost(
    rank: int, hosts: str, victim: int, function: str, count: int, reproducible: bool, number: int, checks: str = "info"
) -> Seen | None:
    """Rank ``victim`` gets a signal as it enters ``function`` for the ``count``-th time in a call."""
    seconds = 3.0 if number == signal.SIGSTOP else 30.0
    model = _model(rank, hosts, checks=checks, timeout_seconds=seconds, reproducible=reproducible)
    for value in (1.0, 2.0, 3.0):
        _step(model, value)
    if rank == victim:
        sys.setprofile(do_when(function, partial(os.kill, os.getpid(), number), nth=count + 1))
    start = time.monotonic()
    with pytest.raises(LostPeerError) as caught:
        _step_twice(model, 1.0 + rank)
    error = caught.value
    return type(error).__name__, error.ranks, error.phase, _is_dropped(model), time.monotonic() - start


ONE_HOST, TWO_HOSTS, CONSECUTIVE = "aaa", "abab", "aabb"  # in "abab" no number is the index on a host


@pytest.mark.parametrize(
    "hosts, victim, function, count, reproducible, checks",
    [
        (ONE_HOST, 0, "divide", 0, False, "info"),
        (ONE_HOST, 1, "divide", 5, False, "info"),
        (ONE_HOST, 2, "divide", 0, True, "info"),
        (TWO_HOSTS, 1, "total_of", 4, False, "info"),
        thorough(TWO_HOSTS, 2, "_start", 1, False, "info"),
        (TWO_HOSTS, 1, "give_out", 5, False, "info"),
        thorough(TWO_HOSTS, 3, "barrier", 0, False, "info"),
        (CONSECUTIVE, 0, "reduce_own_shard", 1, True, "info"),
        thorough(CONSECUTIVE, 2, "broadcast_result", 2, True, "info"),
        # No watchdog tells the lost rank: gloo shows the end of a connection, and ranks leave one after the other.
        (TWO_HOSTS, 3, "total_of", 1, False, "off"),
    ],
)
def test_a_rank_killed_anywhere_in_the_payload_is_named_on_every_host_and_all_gradients_dropped(
    transport: str, hosts: str, victim: int, function: str, count: int, reproducible: bool, checks: str
) -> None:
    arguments = (hosts, victim, function, count, reproducible, signal.SIGKILL, checks)
    seen = run_ranks(_lost, len(hosts), *arguments, lost=(victim,))

    for rank, found in enumerate(seen):
        if found is not None:
            kind, ranks, phase, is_dropped, seconds = found
            assert (kind, ranks, is_dropped) == ("PeerLostError", (victim,) if checks == "info" else (), True)
            has_no_sum = hosts[rank] == hosts[victim] or function == "total_of"
            assert phase == "payload" if has_no_sum else phase in ("payload", "agree")
            assert seconds < 10.0 * slowness()


def test_a_rank_stopped_in_the_payload_is_named_on_both_hosts_after_the_timeout(transport: str) -> None:
    seen = run_ranks(_lost, 4, TWO_HOSTS, 3, "total_of", 2, False, signal.SIGSTOP, lost=(3,))

    assert {found[:4] for found in seen if found} == {("SyncTimeoutError", (3,), "payload", True)}


def _interrupted(rank: int, hosts: str, function: str, reproducible: bool) -> tuple[str, bool]:
    """The rank in the middle is interrupted."""
    model = _model(rank, hosts, reproducible=reproducible)
    _step(model, 1.0)
    name = error_after_interrupt(lambda: _step(model, 1.0 + rank), function, here=rank == len(hosts) // 2)
    return name, _is_dropped(model)


@pytest.mark.parametrize(
    "hosts, function, reproducible",
    [
        ("aa", "settle", False),
        *(thorough("aa", name, False) for name in ("_kept_works", "barrier")),
        ("aa", "divide", False),
        ("aa", "add_in_tree_order", True),
        thorough("aa", "_kept_works", True),
        ("abab", "settle", False),
        *(thorough("abab", name, False) for name in ("_kept_works", "_start", "divide")),
        ("abab", "_poll", False),
        ("aabb", "add_on_host", True),
        *(thorough("aabb", name, True) for name in ("reduce_own_shard", "give_out")),
    ],
)
def test_an_interrupt_anywhere_after_the_header_drops_every_gradient_on_all(
    transport: str, hosts: str, function: str, reproducible: bool
) -> None:
    """In ``_poll``, ``divide`` and ``give_out`` another host may have its result already."""
    seen = run_ranks(_interrupted, len(hosts), hosts, function, reproducible, fresh=True)

    interrupted = len(hosts) // 2
    assert seen[interrupted] == ("KeyboardInterrupt", True)
    for rank in set(range(len(hosts))) - {interrupted}:
        may_have_its_result = function in ("_poll", "divide", "give_out") and hosts[rank] != hosts[interrupted]
        assert seen[rank] == ("PeerLostError", True) or (may_have_its_result and seen[rank] == ("", False))


def test_an_interrupt_before_the_gradients_are_given_out_leaves_none_half_reduced(transport: str) -> None:
    """The other rank has passed the last barrier, and has its result."""
    found = run_ranks(_interrupted, 2, "aa", "alias", False, fresh=True)

    assert found == [("", False), ("KeyboardInterrupt", True)]


CONTINUE = """
import os, pathlib, signal, sys, time
stopped, sign = int(sys.argv[1]), pathlib.Path(sys.argv[2])
while not sign.exists():
    time.sleep(0.01)
os.kill(stopped, signal.SIGCONT)
"""


def _stopped(rank: int, folder: Path, reproducible: bool) -> tuple[str, list[float]]:
    """Rank 1 is stopped in the payload beyond the timeout. The others go on in a new group; then it continues."""
    others = dist.new_group([0, 2])
    model = _model(rank, timeout_seconds=1.0, reproducible=reproducible)
    _step(model, 1.0)
    sign = folder / "sign"
    if rank == 1:
        subprocess.Popen([sys.executable, "-c", CONTINUE, str(os.getpid()), str(sign)])
        sys.setprofile(do_when("divide", partial(os.kill, os.getpid(), signal.SIGSTOP), nth=4))
    with pytest.raises(LostPeerError) as caught:
        _step(model, 7.0)
    if rank == 1:
        (folder / "finished").touch()
        return type(caught.value).__name__, []
    name, means = type(caught.value).__name__, []
    del caught  # its frames hold the gradients, which would then be left alone for this reason
    gc.collect()
    model.process_group = others
    for step in range(3):
        mean = _step(model, float(rank + step))
        if step == 1:  # the second call of a group uses segments; rank 1 wakes and writes while they hold gradients
            dist.barrier(others)
            sign.touch()
            give_up = time.monotonic() + 30.0
            while not (folder / "finished").exists() and time.monotonic() < give_up:
                time.sleep(0.01)
        means += [mean, *model.module.weight.grad.flatten().unique().tolist()]
    return name, means


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_rank_stopped_in_the_payload_writes_later_only_to_memory_that_nobody_uses(
    transport: str, tmp_path: Path, reproducible: bool
) -> None:
    first, stopped, last = run_ranks(_stopped, 3, tmp_path, reproducible, fresh=True)
    assert first == last == ("SyncTimeoutError", [1.0, 1.0, 2.0, 2.0, 3.0, 3.0])
    assert stopped[0].endswith("Error")


def _forked(rank: int) -> tuple[list[float], list[float], list[float]]:
    """What children write to a gradient, to an older one that the user kept, and what the parent sees of it."""
    model = _model(rank)
    weight = model.module.weight
    _step(model, 1.0 + rank)
    kept = weight.grad
    for step in range(3):  # the segment of the kept gradient is closed by now
        _step(model, 2.0 + rank + step)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        seen = [kept[0, 0].item(), weight.grad[0, 0].item()]
        kept.zero_()
        weight.grad.zero_()
        shared = re.findall("rw-s .*/memfd:legacy_ddp", Path("/proc/self/maps").read_text())
        os.write(writing, repr([*seen, kept.sum().item(), weight.grad.sum().item(), len(shared)]).encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    told = eval(os.read(reading, 1000))
    values = kept.unique().tolist() + weight.grad.unique().tolist()
    return told, values, [_step(model, 9.0 + rank)]


def test_what_a_forked_child_writes_stays_in_the_child(transport: str) -> None:
    """A DataLoader worker inherits the memory; its zero_() cleared the gradients of the parent. It kept the memory of
    the other ranks, too."""
    assert run_ranks(_forked, 2, fresh=True) == [([1.5, 4.5, 0.0, 0.0, 0], [1.5, 4.5], [9.5])] * 2


def _left_by_a_parent_with_a_child(rank: int) -> tuple[str, float] | None:
    """A child of the dead rank lives on, with copies of its sockets unless it closes them."""
    model = _model(rank, checks="off")  # no watchdog looks at processes
    _step(model, 1.0)
    if rank == 1:
        if os.fork() == 0:
            time.sleep(20.0)  # outlives the survivors' wait
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(LostPeerError) as caught:
        _step(model, 1.0)
    return str(caught.value), time.monotonic() - start


def test_the_death_of_a_rank_is_seen_at_once_though_its_child_lives(transport: str) -> None:
    (text, seconds), _ = run_ranks(_left_by_a_parent_with_a_child, 2, lost=(1,))
    assert "connection to rank 1 lost" in text
    assert seconds < 10.0 * slowness()


def _late_without_checks(rank: int) -> tuple[str, str]:
    """The time of rank 1 ends first. The hub comes after all time is over."""
    model = _model(rank, checks="off", timeout_seconds=1.5)
    _step(model, 1.0)
    time.sleep((3.0, 0.0, 0.7)[rank])
    with pytest.raises(LostPeerError) as caught:
        _step(model, 1.0)
    return type(caught.value).__name__, str(caught.value)


def test_without_checks_a_timeout_is_not_the_loss_of_the_hub(transport: str) -> None:
    for kind, text in run_ranks(_late_without_checks, 3)[1:]:
        assert kind == "SyncTimeoutError"
        assert "no answer within 1.5 s" in text
