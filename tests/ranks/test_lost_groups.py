"""State of group, call and model after a rank is lost early, late, or by Ctrl-C."""

import gc
import os
import re
import resource
import signal
import subprocess
import sys
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import Checks, LegacyDDPError, LegacyDistributedDataParallel, LostPeerError, PeerError
from tests.helpers.processes import leave_open_files, slowness
from tests.helpers.rank_faults import do_when, error_after_interrupt
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import add_gradients, gradient_values, step, wrap

# Nothing is to take as long as the timeout, which is 30 s where no rank is silent.
AT_ONCE_SECONDS = 5.0


def _never_constructs(rank: int) -> tuple[str, tuple[int, ...], str]:
    if rank == 1:
        time.sleep(3)  # being absent is the fault
        return "", (), ""
    with pytest.raises(LegacyDDPError) as caught:
        wrap(timeout_seconds=1)
    return type(caught.value).__name__, caught.value.ranks, str(caught.value)


def test_a_rank_that_never_constructs_is_named() -> None:
    kind, ranks, text = run_ranks(_never_constructs, 3)[0]
    assert (kind, ranks) == ("SyncTimeoutError", (1,))
    assert "rank 1 did not arrive within 1 s" in text
    assert "preparing data (pass a longer timeout_seconds)" in text


def _store_dies_before_construction(rank: int) -> tuple[str, str, float] | None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(LegacyDDPError) as caught:
        wrap(timeout_seconds=30.0)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - start


def test_the_end_of_the_store_ends_the_construction_of_all_others() -> None:
    for kind, text, seconds in run_ranks(_store_dies_before_construction, 3, lost=(0,), store="rank0")[1:]:
        assert kind == "PeerLostError"
        assert "first collective on this process group failed" in text
        assert seconds < AT_ONCE_SECONDS * slowness()


def _dies_in_construction(rank: int, victim: int) -> tuple[str, tuple[int, ...], str, float] | None:
    if rank == victim:
        sys.setprofile(do_when("exchange_endpoints", partial(os.kill, os.getpid(), signal.SIGKILL)))
    start = time.monotonic()
    try:
        wrap(timeout_seconds=30.0)
    except LegacyDDPError as error:
        return type(error).__name__, error.ranks, str(error), time.monotonic() - start
    return None


@pytest.mark.parametrize("world_size, victim, named", [(3, 0, ()), (3, 1, ()), (2, 1, (1,))])
def test_death_in_the_first_collective_blames_no_living_rank(
    world_size: int, victim: int, named: tuple[int, ...]
) -> None:
    """Each survivor named all others: nobody had told it where they listen, which it took for a reason."""
    seen = run_ranks(_dies_in_construction, world_size, victim, lost=(victim,))
    for kind, ranks, text, seconds in filter(None, seen):
        assert (kind, ranks) == ("PeerLostError", named)
        assert ("the missing rank is not known" in " ".join(text.split())) is not bool(named)
        assert seconds < AT_ONCE_SECONDS * slowness()


def _reads_of_a_loss_at_work(rank: int, directory: Path) -> bool:
    model = wrap(timeout_seconds=30.0, checks=Checks(report_dir=directory))
    add_gradients(model, 1.0)
    model.all_reduce()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    (report,) = directory.glob(f"legacy_ddp-*-rank{rank}-*")
    give_up = time.monotonic() + AT_ONCE_SECONDS
    while "missing rank 2 (its process has ended" not in " ".join(report.read_text().split()):
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)  # no event tells of a line in a file
    return True


def test_all_write_down_who_was_lost_though_none_calls(tmp_path: Path) -> None:
    # Ranks 1 and 3 hold a connection to it; 0 and 4 are told by them.
    assert run_ranks(_reads_of_a_loss_at_work, 5, tmp_path, lost=(2,)) == [True, True, None, True, True]


def _late(rank: int, directory: Path) -> tuple[str, tuple[int, ...], str, str, bool] | None:
    """In a group whose ranks count inside it. At last: whether the model is freed."""
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        return None
    model = wrap(process_group=group, timeout_seconds=1.0, checks=Checks(report_dir=directory))
    module = weakref.ref(model.module)
    add_gradients(model, 1.0)
    if rank == 2:
        time.sleep(3.0)  # being late is the fault
    with pytest.raises(LostPeerError) as caught:
        model.all_reduce()
    with pytest.raises(LostPeerError) as again:
        model.all_reduce()
    found = type(caught.value).__name__, caught.value.ranks, caught.value.report, str(again.value)
    del model, caught, again
    gc.collect()
    return *found, module() is None


def test_a_late_rank_ends_the_wait_at_the_timeout_and_reads_the_same_report_when_it_comes(tmp_path: Path) -> None:
    _, *results = run_ranks(_late, 4, tmp_path)
    for kind, ranks, report, again, is_freed in results:
        assert (kind, ranks, report) == ("SyncTimeoutError", (1,), results[0][2])
        line = " ".join(report.split())
        assert "all_reduce() call 1, phase agree: no answer within 1 s; missing rank 1 (user code after" in line
        assert "in _late, on host" in line
        assert "not usable after an earlier failure" in again
        assert is_freed


def _is_stopped_until_the_others_have_left(rank: int) -> tuple[str, tuple[int, ...], str]:
    model = wrap(timeout_seconds=1.0)
    step(model, 1.0)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    if rank == 1:
        others = [str(int(pid)) for pid in pids if int(pid) != os.getpid()]
        continues = subprocess.Popen([sys.executable, "-c", CONTINUE, str(os.getpid()), *others])
        sys.setprofile(do_when("agree", partial(os.kill, os.getpid(), signal.SIGSTOP)))
    with pytest.raises(LostPeerError) as caught:
        step(model, 1.0)
    sys.setprofile(None)
    if rank == 1:
        assert continues.wait() == 0
    return type(caught.value).__name__, caught.value.ranks, caught.value.report


CONTINUE = """
import os, select, signal, sys
stopped, *others = map(int, sys.argv[1:])
for end in [os.pidfd_open(pid) for pid in others]:
    select.select([end], [], [])  # until that process has ended
os.kill(stopped, signal.SIGCONT)
"""


def test_a_rank_that_was_stopped_until_the_others_left_names_these_and_says_why_they_left() -> None:
    """Its report said that no rank is missing, above a table in which all others are dead."""
    first, (_, ranks, report), last = run_ranks(_is_stopped_until_the_others_have_left, 3, fresh=True)

    assert first[:2] == last[:2] == ("SyncTimeoutError", (1,))
    words = " ".join(report.split())
    assert ranks == (0, 2)
    assert "no rank is missing" not in words
    assert "left because another rank was lost: missing rank 1 (its process is stopped" in words


def _interrupted_in(rank: int, function: str) -> tuple[str, bool]:
    model = LegacyDistributedDataParallel(nn.Linear(512, 512, bias=False))
    weight = model.module.weight
    weight.grad = torch.ones_like(weight)
    name = error_after_interrupt(model.all_reduce, function, here=rank == 1)
    with pytest.raises(LostPeerError):
        model.all_reduce()
    return name, weight.grad is None


@pytest.mark.parametrize("transport", ["gloo"], indirect=True)
@pytest.mark.parametrize("function, dropped", [("settle", False), ("dense_runs", True)])
def test_an_interrupt_after_the_header_leaves_no_gradient_half_reduced_and_no_group_out_of_step(
    transport: str, function: str, dropped: bool
) -> None:
    results = run_ranks(_interrupted_in, 2, function, lost=(0,))
    assert results[1] == ("KeyboardInterrupt", dropped)


def _meets_at_the_limit(
    rank: int, free: int, limited: tuple[int, ...]
) -> tuple[str, tuple[int, ...], dict[str, float | None]]:
    """The error of the first collective, and the gradient of the next one, without the limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank in limited:
        leave_open_files(free)
    with pytest.raises(PeerError) as caught:
        wrap(timeout_seconds=30.0)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    model = wrap(timeout_seconds=30.0)
    add_gradients(model, float(rank))
    model.all_reduce()
    return str(caught.value), caught.value.ranks, gradient_values(model)


@pytest.mark.parametrize("free", [2, 12])
def test_a_rank_at_its_limit_of_open_files_is_an_error_on_all_at_once_and_the_next_call_works(free: int) -> None:
    """The others waited until their timeout, and a thread of gloo aborted the rank."""
    told = run_ranks(_meets_at_the_limit, 2, free, (1,))

    assert told[0] == told[1]
    text, ranks, gradients = told[0]
    assert (ranks, gradients) == ((1,), {"weight": 0.5})
    assert text.startswith("first collective on this process group: rank 1 cannot open its connections: ")
    numbers = (
        rf"got a limit of \d+ open files with room for {free} more, expected room for \d+ more; raise it with ulimit"
    )
    assert re.search(numbers, text)


def test_a_hub_without_room_for_the_ranks_below_it_is_an_error_on_all_and_the_next_call_works() -> None:
    """The hub asked for as much room as a rank without others below it. With many ranks it ran out of room later."""
    free, size = 24, 6  # a rank asks for room for 22, the hub for 27
    told = run_ranks(_meets_at_the_limit, size, free, tuple(range(size)))

    assert len(set(map(repr, told))) == 1
    text, (hub,), gradients = told[0]
    assert gradients == {"weight": 2.5}
    assert text.startswith(f"first collective on this process group: rank {hub} cannot open its connections: ")
    assert "raise it with ulimit -n" in text
