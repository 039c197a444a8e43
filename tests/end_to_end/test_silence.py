"""What must nobody hear of? Training as it should be: no error, no warning, no log record, no report left behind."""

import io
import logging
import math
import multiprocessing
import os
import pdb
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.listening import WARN_SECONDS, Training, own_threads, run, run_silently, said
from tests.helpers.tiers import thorough, thorough_but

# A wait just below a limit, with room for a busy machine. So long, because asking around takes a third of a second: a
# limit taken for half as long would not show otherwise.
SLOW_SECONDS, SLOW_LIMIT_SECONDS = 1.6, 2.0


def _warnings_due(waits: list[float], limit_seconds: float = WARN_SECONDS) -> int:
    """How many records are allowed: one when a wait gets too long, one more whenever that has doubled."""
    return sum(1 + int(math.log2(seconds / limit_seconds)) for seconds in waits if seconds >= limit_seconds)


def _one_is_slower(rank: int, folder: Path) -> list[float]:
    training = Training(folder, warn_after_seconds=SLOW_LIMIT_SECONDS)
    for _ in range(3):
        if rank == 1:
            time.sleep(SLOW_SECONDS)  # being slow is what is tested
        training.step()
    return training.waits


def test_a_rank_that_keeps_others_waiting_for_less_than_the_limit_is_not_mentioned(tmp_path: Path) -> None:
    (waits, _), lines = run(_one_is_slower, 2, tmp_path)
    assert sum(waits) > SLOW_SECONDS  # it did wait
    assert len(lines) <= _warnings_due(waits, SLOW_LIMIT_SECONDS), lines  # none, unless the machine made it late


def _late_early_calls(rank: int, folder: Path) -> list[float]:
    """Rank 1 comes to the first two calls of two wrappers when rank 0 has said something of it."""
    trainings = [Training(folder, early_calls=0) for _ in range(2)]
    for training in 2 * trainings:
        before = said(folder, 0)
        while rank == 1 and said(folder, 0) == before:
            time.sleep(0.02)  # compilation
        training.step()
    waits = [seconds for training in trainings for seconds in training.waits]
    for training in 2 * trainings:
        training.step()
    return waits


def test_a_long_wait_in_one_of_the_first_two_calls_of_a_wrapper_is_a_line(tmp_path: Path) -> None:
    (waits, _), lines = run(_late_early_calls, 2, tmp_path)

    assert 4 <= len(lines) <= _warnings_due(waits), lines
    assert all(line.endswith((", in one of the first calls", ", alive", ", alive and busy")) for line in lines), lines


# Ranks that do something else meanwhile


def _evaluate(training: Training, until: float, folder: Path) -> None:
    with torch.no_grad():
        while time.monotonic() < until:
            training.model(torch.ones(64, 4))


def _save(training: Training, until: float, folder: Path) -> None:
    large = nn.Linear(2500, 2500)
    while time.monotonic() < until:
        torch.save(large.state_dict(), folder / "checkpoint.pt")


def _debug(training: Training, until: float, folder: Path) -> None:
    reading, writing = os.pipe()
    timer = threading.Timer(until - time.monotonic(), os.write, (writing, b"c\n"))
    timer.start()
    with os.fdopen(reading) as commands:
        pdb.Pdb(stdin=commands, stdout=io.StringIO(), nosigint=True, readrc=False).set_trace()
        timer.join()


_OTHER_WORK = {
    "evaluates": (_evaluate, "(forward|user code) after all_reduce"),
    "saves": (_save, "user code after all_reduce"),
    "is in the debugger": (_debug, "debugger after all_reduce"),
}


def _works_alone(rank: int, folder: Path, what: str) -> list[float]:
    training = Training(folder)
    if rank == 1:
        _OTHER_WORK[what][0](training, time.monotonic() + 3.2 * WARN_SECONDS, folder)
    training.step()
    return training.waits


@pytest.mark.parametrize("what", thorough_but(["saves", "is in the debugger"], _OTHER_WORK))
def test_a_rank_that_does_something_else_gets_a_line_that_says_what_and_no_report(what: str, tmp_path: Path) -> None:
    (waits, *_), lines = run(_works_alone, 3, tmp_path, what)

    assert waits[-1] > 2 * WARN_SECONDS  # a report would be due
    assert 1 <= len(lines) <= _warnings_due(waits)
    where = _OTHER_WORK[what][1]
    for line in lines:
        assert re.fullmatch(
            rf"legacy_ddp WARNING: all_reduce\(\) call 3, phase agree: ranks have waited for \d\.\d s; "
            rf"missing rank 1 \({where}\(\) call 2, at end_to_end/test_silence.py:\d+ in \w+"
            r"(, inside \S+ in \w+)?, "
            r"on host \S+\), alive( and busy)?",
            line,
        ), line


# Leaving


def _leave_in_order(rank: int, folder: Path, order: tuple[int, ...]) -> None:
    training = Training(folder)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in order]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    if place := order.index(rank):
        while Path(f"/proc/{int(pids[order[place - 1]])}").exists():
            _evaluate(training, time.monotonic() + 0.02, folder)
        if place == 1:
            _evaluate(training, time.monotonic() + 1.2 * WARN_SECONDS, folder)
    dist.destroy_process_group()


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("order", [(0, 1, 2), thorough((2, 1, 0))])
def test_ranks_that_leave_one_after_the_other_are_not_missed(order: tuple[int, ...], tmp_path: Path) -> None:
    run_silently(_leave_in_order, 3, tmp_path, order)


def _returns_without_destroying(rank: int, folder: Path) -> None:
    logging.basicConfig(filename=folder / f"log-{rank}", level=logging.WARNING)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    training = Training(folder)
    for _ in range(5):
        training.step()
    if rank == 0:
        time.sleep(1.0)  # the other one has left


def test_children_of_multiprocessing_that_return_without_destroying_their_group_are_not_missed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")  # its children end without what atexit knows
    children = [context.Process(target=_returns_without_destroying, args=(rank, tmp_path)) for rank in (0, 1)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)

    assert [child.exitcode for child in children] == [0, 0]
    assert [(tmp_path / f"log-{rank}").read_text() for rank in (0, 1)] == ["", ""]
    assert list(tmp_path.rglob("legacy_ddp-*")) == []


def _made_again(rank: int, folder: Path) -> list[tuple[list[str], int]]:
    left = []
    for number in range(3):
        training = Training(folder)
        for _ in range(5):
            training.step()
        dist.destroy_process_group()
        left.append((own_threads(), len(os.listdir("/proc/self/fd"))))
        store = f"file://{folder}/store-{number}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        training.step()  # the wrapper of before, on the group of now
    return left


@pytest.mark.skipif(not Path("/proc").exists(), reason="counts descriptors in /proc")
def test_process_groups_can_be_destroyed_and_made_again_silently(tmp_path: Path) -> None:
    for left in run_silently(_made_again, 2, tmp_path):
        assert [threads for threads, _ in left] == [[]] * 3
        assert len({descriptors for _, descriptors in left}) == 1
