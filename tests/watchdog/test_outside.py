"""Waits and ends outside of the calls of the library: in collectives of the script, before and behind the training."""

import fcntl
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers.listening import Training, listen, run_silently, said
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import fork_scripts
from tests.helpers.tiers import thorough_but

SECONDS = 0.4  # warn_after_seconds
ENDED = "the wait outside of calls has ended"
# Not the report on a call: on a crowded machine an early call may have one, before the scene has begun.
TOLD_IN_FULL = "outside of calls: .*innermost last"


def said_by_any(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("said-by-rank-*.txt"))


def _hold(folder: Path, text: str) -> None:
    """Do nothing until a rank has said what matches ``text``. The limit of the test is the limit of this wait."""
    while not re.search(text, said_by_any(folder), re.DOTALL):
        threading.Event().wait(0.02)


def _evaluates(rank: int, folder: Path) -> None:
    """Rank 0 computes until four times the time of the first warning have passed."""
    end = float("inf")
    while rank == 0 and time.monotonic() < end:
        torch.randn(200, 200).mm(torch.randn(200, 200))
        if end == float("inf") and "busy" in said_by_any(folder):
            end = time.monotonic() + 4 * SECONDS
    dist.barrier()


def _receives(rank: int, folder: Path) -> None:
    if rank == 0:
        _hold(folder, TOLD_IN_FULL)
        dist.send(torch.ones(1), 1)
    elif rank == 1:
        dist.recv(torch.ones(1), 0)
    dist.barrier()


def _subgroup(rank: int, folder: Path) -> None:
    group = dist.new_group([0, 1])
    if rank == 1:
        _hold(folder, TOLD_IN_FULL)
    if rank < 2:
        dist.barrier(group)
    else:
        _hold(folder, TOLD_IN_FULL)  # what this rank does is its own business
    dist.barrier()


def _waits_for_work(rank: int, folder: Path) -> None:
    if rank == 0:
        _hold(folder, TOLD_IN_FULL)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()


def _waits_under_signals(rank: int, folder: Path) -> None:
    """Of a profiler, a timer or the scheduler: each wakes the thread, which waits on."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    main, is_over = threading.get_ident(), threading.Event()

    def send() -> None:
        for _ in range(100):
            if is_over.wait(SECONDS / 2):
                return
            signal.pthread_kill(main, signal.SIGUSR1)

    thread = threading.Thread(target=send)
    if rank == 0:
        _hold(folder, TOLD_IN_FULL)
    else:
        thread.start()
    dist.barrier()
    assert rank == 0 or thread.is_alive(), "it was told after the signals alone"
    is_over.set()


def _wait_for_each_other(rank: int, folder: Path) -> None:
    """Two collectives in another order on rank 0. Once that is told, other threads make those that are missing."""
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    thread = threading.Thread(target=_go_on, args=(rank, groups, folder))
    thread.start()
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=groups[0])
    else:
        dist.broadcast(torch.ones(1), 0, group=groups[1])
    thread.join()


def _go_on(rank: int, groups: Sequence[Any], folder: Path) -> None:
    _hold(folder, TOLD_IN_FULL)
    if rank == 0:
        dist.broadcast(torch.ones(1), 0, group=groups[1])
    else:
        dist.all_reduce(torch.ones(1), group=groups[0])


def _loads_data(rank: int, folder: Path) -> None:
    if rank == 0:
        next(iter(DataLoader(_HeldData(folder), num_workers=1)))
    dist.barrier()


class _HeldData(Dataset[torch.Tensor]):
    """Data whose worker waits, as for a lock that was held while it was forked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> torch.Tensor:
        _hold(self._folder, TOLD_IN_FULL)
        return torch.ones(1)


def _locks_a_file(rank: int, folder: Path) -> None:
    if rank == 0:
        with (folder / "lock").open("w") as held, (folder / "lock").open("w") as wanted:
            fcntl.flock(held, fcntl.LOCK_EX)
            threading.Thread(target=_unlock, args=(held, folder)).start()
            fcntl.flock(wanted, fcntl.LOCK_EX)
    dist.barrier()


def _unlock(held: Any, folder: Path) -> None:
    _hold(folder, TOLD_IN_FULL)
    fcntl.flock(held, fcntl.LOCK_UN)


def _told(rank: int, folder: Path, scene: Callable[[int, Path], None]) -> None:
    training = Training(folder, warn_after_seconds=SECONDS)
    scene(rank, folder)
    training.step()
    # Not in a collective: a rank that waits again before its next look has no end to tell.
    _hold(folder, ENDED)
    dist.barrier()


def _place(function: str) -> str:
    return rf"at watchdog/test_outside\.py:\d+ in {function}"


def _wait(ranks: str, call: str, function: str, of: str = "") -> str:
    return rf"{ranks} waited \d+ s in {call}\(\){of} {_place(function)}"


def _absent(function: str = "_hold", rank: int = 0) -> str:
    return f"rank {rank} is not there: {_place(function)}, idle"


OTHERS = "ranks 1-2 have"
TOLD = {
    "receives": (
        _receives,
        f"{_wait('rank 1 has', 'recv', '_receives', ' for rank 0')}; {_wait('rank 2 has', 'barrier', '_receives')}; "
        f"{_absent()}",
    ),
    "subgroup": (_subgroup, f"{_wait('rank 0 has', 'barrier', '_subgroup', ' of ranks 0-1')}; {_absent(rank=1)}"),
    "work": (_waits_for_work, f"{_wait(OTHERS, 'wait', '_waits_for_work')}; {_absent()}"),
    "signals": (
        _waits_under_signals,
        f"{_wait('(?:rank [12] has|ranks 1-2 have)', 'barrier', '_waits_under_signals')}; {_absent()}",
    ),
    "each other": (
        _wait_for_each_other,
        f"{_wait('rank 0 has', 'all_reduce', '_wait_for_each_other')}; "
        f"{_wait(OTHERS, 'broadcast', '_wait_for_each_other')}; "
        "they wait for each other: make the same collectives in the same order on every rank",
    ),
    "a worker of a loader": (_loads_data, f"{_wait(OTHERS, 'barrier', '_loads_data')}; {_absent('_loads_data')}"),
    "a file lock": (_locks_a_file, f"{_wait(OTHERS, 'barrier', '_locks_a_file')}; {_absent('_locks_a_file')}"),
}


@pytest.mark.parametrize("name", thorough_but(["receives", "subgroup", "work", "each other"], TOLD))
def test_a_rank_that_others_wait_for_outside_of_calls_is_named_once_with_places_and_stacks(
    name: str, tmp_path: Path
) -> None:
    scene, expected = TOLD[name]
    run_ranks(partial(listen, _told, tmp_path), 3, scene, fresh=True)
    text = " ".join(" ".join(said(tmp_path, 0)).split())

    told = re.findall(rf"legacy_ddp WARNING: outside of calls: {expected}(, as reported)?", text)
    assert told[:1] == [""], text
    assert all(told[1:])  # once in full
    assert "stack of rank 0, innermost last:" in text
    assert ENDED in text
    assert not any("outside of calls" in line for rank in (1, 2) for line in said(tmp_path, rank))


def test_a_rank_that_computes_alone_is_one_calm_line(tmp_path: Path) -> None:
    run_ranks(partial(listen, _told, tmp_path), 3, _evaluates, fresh=True)
    lines = list(takewhile(lambda line: ENDED not in line, said(tmp_path, 0)))

    assert len(lines) == 1
    assert re.search(r"ranks 1-2 have waited \d+ s in barrier\(\) .*; rank 0 is not there: .*, busy$", lines[0])


def _healthy(rank: int, folder: Path) -> None:
    """Collectives of the script, and a pipeline of sends, for many looks."""
    training = Training(folder, warn_after_seconds=0.2)
    end = time.monotonic() + 4.0
    stop = torch.zeros(1)
    while not stop.item():
        training.step()
        dist.all_reduce(torch.ones(3))
        if rank > 0:
            dist.recv(torch.ones(1), rank - 1)
        if rank < 2:
            dist.send(torch.ones(1), rank + 1)
        for _ in range(100):  # most looks meet the same line
            dist.barrier()
        stop.fill_(float(time.monotonic() > end and rank == 0))
        dist.broadcast(stop, 0)


def test_a_loop_that_moves_is_silent(tmp_path: Path) -> None:
    run_silently(_healthy, 3, tmp_path)


def _one_is_slow(rank: int, folder: Path) -> None:
    training = Training(folder, warn_after_seconds=1.5)
    for _ in range(6):
        training.step()
        if rank == 0:
            time.sleep(0.5)
        dist.barrier()


def test_a_rank_that_is_slow_in_every_step_is_not_mentioned(tmp_path: Path) -> None:
    run_silently(_one_is_slow, 3, tmp_path)


def _late(rank: int, folder: Path, level: str) -> None:
    if rank == 0 and level == "off":
        time.sleep(3 * SECONDS)
    elif rank == 0:
        _hold(folder, "has not come")
    LegacyDistributedDataParallel(nn.Linear(1, 1), checks=Checks(level, warn_after_seconds=SECONDS))


@pytest.mark.parametrize("level", ["info", "off"])
def test_ranks_that_do_not_come_to_the_constructor_are_named_by_one_rank(level: str, tmp_path: Path) -> None:
    run_ranks(partial(listen, _late, tmp_path), 3, level, fresh=True)
    lines = [line for rank in range(3) for line in said(tmp_path, rank) if "has not come" in line]

    assert all("rank 0 has not come within" in line for line in lines)
    assert bool(lines) == (level == "info")
    assert len({line.split(" within ")[0] for line in lines}) <= 1
    assert all(line.endswith(", as reported") for line in lines[1:])
    ended = [line for rank in range(3) for line in said(tmp_path, rank) if "all ranks have come after" in line]
    assert len(ended) == (level == "info")


_SCRIPT = """
import logging, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from legacy_ddp import Checks, LegacyDistributedDataParallel

class _Tell(logging.Filter):
    def filter(self, record):
        Path("told").touch()  # by the first record of the log, on any rank
        return True

logging.getLogger("legacy_ddp").addFilter(_Tell())
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=3)
model = LegacyDistributedDataParallel(nn.Linear(2, 1), checks=Checks(warn_after_seconds=float(os.environ["SECONDS"])))
for _ in range(2):
    model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    model.all_reduce()
"""


def _run(folder: Path, end: str, seconds: float = 60.0) -> list[Any]:
    """The script with ``end``, on three ranks."""
    (folder / "script.py").write_text(_SCRIPT + end)
    settings = [{"RANK": str(rank), "SECONDS": str(seconds)} for rank in range(3)]
    return fork_scripts([("script.py",)] * 3, settings, cwd=folder)


_GATHER = """
def validate():
    {how}
if rank == 1:
    validate()
found = [None] * 3
dist.all_gather_object(found, rank)
"""
ENDS = {
    "an exception": ('raise ValueError("bad batch 17")', "with ValueError: bad batch 17, at script.py:22 in validate"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "unexpectedly"),
    "no error": ("sys.exit()", "left without an error after all_reduce() call 2, at the end of its script"),
}


@pytest.mark.parametrize("how", ENDS)
def test_the_rank_that_ended_first_is_told_at_once_and_behind_the_error_of_every_survivor(
    how: str, tmp_path: Path
) -> None:
    code, expected = ENDS[how]
    runs = _run(tmp_path, _GATHER.format(how=code))
    texts: list[Any] = [run.stderr for run in runs]

    assert 0 not in (runs[0].returncode, runs[2].returncode)
    told = [[line for line in text.splitlines() if "legacy_ddp rank" in line and expected in line] for text in texts]
    assert told[1] == []
    at_the_end = "this rank ends because the connection to it is lost"
    for rank in (0, 2):
        assert len([line for line in told[rank] if at_the_end in line]) == 1, texts[rank]
        assert texts[rank].index("RuntimeError: ") < texts[rank].index(at_the_end)


_AFTER_A_WAIT = """
if rank == 1:
    while not os.path.exists("told"):
        time.sleep(0.02)
    sys.exit()
dist.barrier()
"""


@pytest.mark.thorough
def test_the_end_of_a_wait_by_the_end_of_a_rank_was_told_as_if_all_were_well(tmp_path: Path) -> None:
    text = "".join(run.stderr for run in _run(tmp_path, _AFTER_A_WAIT, SECONDS))

    assert "rank 1 is not there" in " ".join(text.split())
    assert ENDED not in text
    assert len(re.findall("rank 1 left without an error .*; this rank ends because", text)) == 2


_OTHERS_GO_ON = """
if rank == 1:
    raise ValueError("bad batch 17")
end = time.monotonic() + 60
while not os.path.exists("told") and time.monotonic() < end:
    time.sleep(0.02)
"""


def test_a_rank_that_raises_while_the_others_go_on_is_told_at_once_by_one_rank(tmp_path: Path) -> None:
    runs = _run(tmp_path, _OTHERS_GO_ON)
    told = [[line for line in run.stderr.splitlines() if "legacy_ddp rank" in line] for run in runs]

    assert [run.returncode for run in runs] == [0, 1, 0]
    assert told[:2] == [[], []]
    (line,) = told[2]
    assert "rank 1 left after all_reduce() call 2 with ValueError: bad batch 17, at script.py:" in line
