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

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, LostPeerError
from tests.helpers.rank_faults import do_when, error_after_interrupt
from tests.helpers.ranks import run_ranks, slowness
from tests.helpers.small_sizes import sum_chunks_of
from tests.helpers.tiers import thorough

NUMEL = 20 * 64
CHUNK = 64
pytestmark = pytest.mark.parametrize("transport", ["host"], indirect=True)


def _model(
    *, checks: str = "info", timeout_seconds: float = 30.0, reproducible: bool = False
) -> LegacyDistributedDataParallel:
    sum_chunks_of(CHUNK)
    net = nn.Linear(NUMEL, 1, bias=False)
    return LegacyDistributedDataParallel(
        net, transport="host", checks=checks, timeout_seconds=timeout_seconds, reproducible=reproducible
    )


def _step(model: LegacyDistributedDataParallel, value: float) -> float:
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


def _memory_is_left(model: LegacyDistributedDataParallel) -> bool:
    """Whether no flat tensor and no sum of the failed call will be used again."""
    leaves, (buffer,) = model._synchronizer.leaves, model._synchronizer.planner._known.buffers
    return buffer._views is None and (leaves is None or leaves.sums._sums == [])


def _killed_at_chunk(
    rank: int, victim: int, chunk: int, reproducible: bool
) -> tuple[str, tuple[int, ...], str | None, bool, float] | None:
    model = _model(reproducible=reproducible)
    _step(model, 1.0)
    if rank == victim:
        sys.setprofile(do_when("divide", partial(os.kill, os.getpid(), signal.SIGKILL), nth=chunk + 1))
    start = time.monotonic()
    with pytest.raises(LostPeerError) as caught:
        _step(model, 1.0 + rank)
    seconds = time.monotonic() - start
    return (
        type(caught.value).__name__,
        caught.value.ranks,
        caught.value.phase,
        model.module.weight.grad is None and _memory_is_left(model),
        seconds,
    )


@pytest.mark.parametrize(
    "victim, chunk, reproducible",
    [(0, 0, False), thorough(0, 3, True), thorough(1, 0, False), (1, 5, False), (2, 0, True), thorough(2, 5, False)],
)
def test_a_rank_killed_at_any_chunk_is_named_and_all_gradients_dropped(
    transport: str, victim: int, chunk: int, reproducible: bool
) -> None:
    """The hub, and two other ranks."""
    seen = run_ranks(_killed_at_chunk, 3, victim, chunk, reproducible, lost=(victim,))
    for kind, ranks, phase, is_dropped, seconds in filter(None, seen):
        assert (kind, ranks, phase, is_dropped) == ("PeerLostError", (victim,), "payload", True)
        assert seconds < 10.0 * slowness()


def _interrupted(rank: int, function: str, reproducible: bool = False) -> tuple[str, bool]:
    model = _model(reproducible=reproducible)
    _step(model, 1.0)
    name = error_after_interrupt(lambda: _step(model, 1.0 + rank), function, here=rank == 1)
    return name, model.module.weight.grad is None and _memory_is_left(model)


@pytest.mark.parametrize(
    "function, reproducible",
    [
        ("settle", False),
        thorough("_kept_works", False),
        ("divide", False),
        thorough("barrier", False),
        thorough("settle", True),
        thorough("_kept_works", True),
        ("add_in_tree_order", True),
    ],
)
def test_an_interrupt_anywhere_after_the_header_drops_every_gradient_on_all(
    transport: str, function: str, reproducible: bool
) -> None:
    found = run_ranks(_interrupted, 2, function, reproducible, fresh=True)
    assert found == [("PeerLostError", True), ("KeyboardInterrupt", True)]


def test_an_interrupt_before_the_gradients_are_given_out_leaves_none_half_reduced(transport: str) -> None:
    """The other rank has passed the last barrier, and has its result."""
    assert run_ranks(_interrupted, 2, "alias", fresh=True) == [("", False), ("KeyboardInterrupt", True)]


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
    model = _model(timeout_seconds=1.0, reproducible=reproducible)
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
    model = _model()
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
    model = _model(checks="off")  # no watchdog looks at processes
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


def _late_without_checks(rank: int, late: int) -> tuple[str, str] | None:
    model = _model(checks="off", timeout_seconds=1.5)
    _step(model, 1.0)
    first = 1 if late == 0 else 0
    if rank != first:  # whose time ends before that of the third rank
        time.sleep(3.0 if rank == late else 0.7)
    with pytest.raises(LostPeerError) as caught:
        _step(model, 1.0)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("late", [0, thorough(1), thorough(2)])
def test_without_checks_a_timeout_is_not_the_loss_of_the_hub(transport: str, late: int) -> None:
    seen = run_ranks(_late_without_checks, 3, late)
    for kind, text in [told for rank, told in enumerate(seen) if rank != late]:
        assert kind == "SyncTimeoutError"
        assert "no answer within 1.5 s" in text
