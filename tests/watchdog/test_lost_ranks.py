"""Ranks lost in every way: all other ranks get the same error at once, keep their gradients, and end cleanly.

``pytest -s`` prints how long each survivor waited between the fault and its error.
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers import processes, rank_faults
from tests.helpers.processes import slowness
from tests.helpers.rank_faults import Scene, Seen, Stage, do_when, play
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import thorough

# Promised: an error within timeout_seconds and this much more.
SLACK_SECONDS = 5.0
# What was measured for a process that ended is far less; the timeout is out of reach, so nobody can have waited for it.
AT_ONCE_SECONDS = 5.0
TIMEOUT_SECONDS = 2.0
WHO = [pytest.param(2, "file", id="rank 2"), pytest.param(0, "rank0", id="rank 0 with the store")]


Lose = Callable[..., dict[int, Seen]]


@pytest.fixture
def lose(tmp_path: Path, request: pytest.FixtureRequest) -> Lose:
    """Play a scene; check what holds for every survivor of any, and print how long they waited."""

    def lose(world_size: int, victims: tuple[int, ...], fault: Any, store: str = "file", **scene: Any) -> dict:
        seen = play(Scene(tmp_path, victims, fault, **scene), world_size, store=store)
        assert sorted(seen) == [rank for rank in range(world_size) if rank not in victims]
        for rank, survivor in seen.items():
            _check(rank, survivor, victims)
        assert len({survivor.report for survivor in seen.values()}) == 1
        slowest = max(survivor.seconds for survivor in seen.values())
        print(f"\n{request.node.name}: {slowest:.2f} s from the fault to the last survivor's error")
        return seen

    return lose


def _check(rank: int, seen: Seen, victims: tuple[int, ...]) -> None:
    named = [rank for rank in re.findall(r"(?m)^ *(\d+)  ", seen.report) if int(rank) in victims]
    assert seen.ranks == victims
    assert len(named) == len(victims)
    assert seen.text.startswith(seen.report)
    assert all(len(line) <= 80 for line in seen.report.splitlines())
    # On disk before the exception left all_reduce.
    assert f"-rank{rank}-" in seen.file.name
    assert seen.report in seen.file_text
    assert seen.gradients == ("none" if seen.phase == "payload" or seen.on_host else "untouched")
    assert seen.again == "LostPeerError"


def _check_all(seen: dict[int, Seen], kind: str, phase: str, within: float, *said: str) -> None:
    for survivor in seen.values():
        assert (survivor.kind, survivor.phase) == (kind, phase)
        assert survivor.seconds < within * slowness()
        words = " ".join(survivor.report.split())
        for text in said:
            assert text in words


@pytest.mark.slow
@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("victim, store", WHO)
def test_a_killed_rank_is_named_at_once(lose: Lose, victim: int, store: str) -> None:
    seen = lose(3, (victim,), rank_faults.killed, store)
    _check_all(seen, "PeerLostError", "agree", AT_ONCE_SECONDS, f"missing rank {victim} (its process has ended")


@pytest.mark.parametrize("victim, store", WHO)
def test_a_rank_killed_before_the_others_call_is_named_at_once(lose: Lose, victim: int, store: str) -> None:
    seen = lose(3, (victim,), rank_faults.killed_early, store, before=rank_faults.outlive_in_backward)
    _check_all(seen, "PeerLostError", "agree", AT_ONCE_SECONDS, f"missing rank {victim} (its process has ended")


def test_the_last_of_two_names_the_other(lose: Lose) -> None:
    seen = lose(2, (1,), rank_faults.killed)
    _check_all(seen, "PeerLostError", "agree", AT_ONCE_SECONDS, "missing rank 1 (its process has ended")


def test_all_of_five_ranks_name_a_killed_rank_long_before_a_timeout_of_a_minute(lose: Lose) -> None:
    seen = lose(5, (2,), rank_faults.killed, timeout_seconds=60.0)  # gloo tells its neighbours in the ring, 1 and 3
    _check_all(seen, "PeerLostError", "agree", 3.0, "missing rank 2 (its process has ended")


def test_a_rank_that_fails_in_a_child_of_spawn_sends_its_error_and_not_its_exit_code(lose: Lose) -> None:
    seen = lose(3, (1,), rank_faults.fails_in_a_child_of_spawn)
    said = "missing rank 1 (left after all_reduce() call 2 with ValueError: bad batch"
    _check_all(seen, "PeerLostError", "agree", AT_ONCE_SECONDS, said)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("victim, reproducible", [(0, False), (2, True)])
def test_death_in_the_payload_leaves_no_gradient_half_reduced(lose: Lose, victim: int, reproducible: bool) -> None:
    many = {"numel": 2**20, "buffer_size": 2**13, "reproducible": reproducible}  # 128 collectives or more in one call
    seen = lose(3, (victim,), rank_faults.killed_in_payload, **many)
    _check_all(seen, "PeerLostError", "payload", AT_ONCE_SECONDS, f"missing rank {victim} (its process has ended")


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("victim, store", WHO)
def test_a_stopped_rank_is_named_at_the_timeout(lose: Lose, victim: int, store: str) -> None:
    seen = lose(3, (victim,), rank_faults.stopped, store, timeout_seconds=TIMEOUT_SECONDS)
    said = f"no answer within 2 s; missing rank {victim} (its process is stopped"
    _check_all(seen, "SyncTimeoutError", "agree", TIMEOUT_SECONDS + SLACK_SECONDS, said)


def test_the_report_shows_the_loop_that_a_rank_does_not_leave(lose: Lose) -> None:
    seen = lose(3, (2,), rank_faults.loops_for_ever, timeout_seconds=TIMEOUT_SECONDS)
    said = "missing rank 2 (user code after all_reduce() call 2, at helpers/rank_faults.py:", "in loops_for_ever, on"
    _check_all(seen, "SyncTimeoutError", "agree", TIMEOUT_SECONDS + SLACK_SECONDS, *said)
    assert "stack of rank 2, innermost last:" in seen[1].report


def test_two_ranks_killed_at_once_are_both_named(lose: Lose) -> None:
    seen = lose(4, (1, 2), rank_faults.killed_with_another)
    _check_all(seen, "PeerLostError", "agree", AT_ONCE_SECONDS, "missing ranks 1-2 (its process has ended")


def test_a_killed_and_a_stopped_rank_are_both_named(lose: Lose) -> None:
    # Not as long as elsewhere: who waits for the stopped one in gloo's ring can exit only after the timeout.
    fault = partial(rank_faults.killed_with_another, number=signal.SIGSTOP)
    seen = lose(4, (1, 2), fault, timeout_seconds=3.0)
    said = "rank 1 (its process has ended, on host", "rank 2 (its process is stopped, on host"
    _check_all(seen, "PeerLostError", "agree", AT_ONCE_SECONDS, *said)


@pytest.mark.parametrize("function", [thorough("append"), "_make_report", thorough("broadcast_failure")])
def test_the_others_still_get_a_report_when_the_reporting_rank_is_killed(lose: Lose, function: str) -> None:
    seen = lose(4, (0, 3), partial(rank_faults.killed_while_reporting, function=function))
    _check_all(seen, "PeerLostError", "agree", AT_ONCE_SECONDS, "missing ranks 0, 3 (its process has ended")


def _start_no_more_threads(_: Stage) -> None:
    threading.stack_size(2**47)  # more than the address space holds


def test_a_killed_rank_is_named_by_all_others_though_these_can_start_no_thread(lose: Lose) -> None:
    seen = lose(4, (1,), rank_faults.killed, before=_start_no_more_threads)
    _check_all(seen, "PeerLostError", "agree", AT_ONCE_SECONDS, "missing rank 1 (its process has ended")


def test_several_silent_ranks_are_named_by_all_others(lose: Lose) -> None:
    """They were asked one after the other for a report, until time was up: a living rank was then blamed."""
    seen = lose(5, (0, 1, 2), rank_faults.holds_the_gil, timeout_seconds=TIMEOUT_SECONDS)
    said = "missing ranks 0-2 (its process is running but does not answer: Python may be held up by C code"
    _check_all(seen, "SyncTimeoutError", "agree", TIMEOUT_SECONDS + SLACK_SECONDS, said)


def _start_own_collective(stage: Stage) -> None:
    stage.kept = dist.all_reduce(torch.zeros(1000), async_op=True)


def test_a_collective_of_the_user_in_flight_neither_delays_the_report_nor_the_exit(lose: Lose) -> None:
    seen = lose(4, (1,), rank_faults.killed, before=_start_own_collective)
    _check_all(seen, "PeerLostError", "agree", AT_ONCE_SECONDS, "missing rank 1 (its process has ended")


def test_a_killed_rank_is_named_at_once_though_its_forked_worker_holds_its_connections(lose: Lose) -> None:
    seen = lose(3, (1,), rank_faults.killed_with_a_worker, timeout_seconds=4.0)  # until then gloo waits for the worker
    _check_all(seen, "PeerLostError", "agree", 3.0, "missing rank 1 (its process has ended")


def _goes_on_after_a_stop(rank: int, directory: Path, where: str) -> tuple[list[float], bool]:
    """Four steps; rank 1 is stopped in the third, for a second."""
    stage = Stage(
        Scene(directory, (1,), rank_faults.stopped, timeout_seconds=10.0, numel=2**16, buffer_size=2**10), rank
    )
    means = [stage.step(float(rank)) for _ in range(2)]
    if rank == 1:
        sys.setprofile(do_when(where, partial(os.kill, os.getpid(), signal.SIGSTOP)))
    else:
        threading.Thread(target=_wake_when_stopped, args=(stage.pid(1),), daemon=True).start()
    start = time.monotonic()
    means.append(stage.step(float(rank)))
    waited = time.monotonic() - start
    sys.setprofile(None)
    means.append(stage.step(float(rank)))
    return means, waited > 0.9


def _wake_when_stopped(pid: int) -> None:
    while processes.state(pid) not in "TZ":
        time.sleep(0.01)  # no event tells of the stop of a process that is no child
    time.sleep(1.0)  # being stopped for so long is the fault
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("where", [thorough("backward"), "agree", "payload"])
def test_a_rank_that_is_stopped_and_goes_on_in_time_changes_nothing(tmp_path: Path, transport: str, where: str) -> None:
    function = {"host": "divide", "gloo": "_finish"}[transport] if where == "payload" else where
    results = run_ranks(_goes_on_after_a_stop, 3, tmp_path, function)
    assert [means for means, _ in results] == [[1.0] * 4] * 3  # of 0, 1 and 2
    assert results[1][1]  # it was stopped, indeed
    assert list(tmp_path.glob("legacy_ddp-*")) == []  # nothing to report: no file stays
