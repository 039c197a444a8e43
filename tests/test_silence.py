"""What must nobody hear of? Training as it should be: no error, no warning, no log record, no report left behind."""

import io
import logging
import math
import multiprocessing
import os
import pdb
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
from torch import nn
from torch.utils.data import DataLoader, Dataset

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.ranks import RankFailure, run_ranks

WARN_SECONDS = 1.0
# What is just below it, with room for a busy machine.
SLOW_SECONDS = 0.75
# The first calls are not warned of.
EARLY_CALLS = 2
STACKS = "most recent call first"  # as faulthandler writes them


def _said_path(folder: Path, rank: int) -> Path:
    return folder / f"said-by-rank-{rank}.txt"


def _listen(function: Callable[..., Any], folder: Path, rank: int, *args: Any) -> Any:
    """Child: keep in a file whatever it says until its process ends: log records, and what reaches stderr otherwise."""
    os.dup2(os.open(_said_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
    logging.getLogger("legacy_ddp").addHandler(handler)
    return function(rank, folder, *args)


def _said(folder: Path, rank: int) -> list[str]:
    return _said_path(folder, rank).read_text().splitlines()


def _reports(folder: Path) -> list[Path]:
    return sorted(folder.glob("legacy_ddp-*.txt"))


def _run(function: Callable[..., Any], world_size: int, folder: Path, *args: Any) -> tuple[list[Any], list[str]]:
    """What the ranks return, and all lines that they said; they leave no report."""
    results = run_ranks(partial(_listen, function, folder), world_size, *args)
    assert _reports(folder) == []
    return results, [line for rank in range(world_size) for line in _said(folder, rank)]


def _run_silently(function: Callable[..., Any], world_size: int, folder: Path, *args: Any) -> list[Any]:
    results, said = _run(function, world_size, folder, *args)
    assert said == []
    return results


def _warnings_due(waits: list[float]) -> int:
    """How many records are allowed: one when a wait gets too long, one more whenever that has doubled."""
    return sum(1 + int(math.log2(seconds / WARN_SECONDS)) for seconds in waits if seconds >= WARN_SECONDS)


class _Training:
    """A small model that is trained on every rank; ``waits``: how long each call waited for other ranks."""

    def __init__(self, folder: Path | None, *, early_calls: int = EARLY_CALLS, **checks: Any) -> None:
        checks = {"warn_after_seconds": WARN_SECONDS, "report_dir": folder, **checks}
        self.model = LegacyDistributedDataParallel(nn.Linear(4, 2), checks=Checks(**checks))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.waits: list[float] = []
        for _ in range(early_calls):
            self.step()

    def step(self) -> None:
        self.model(torch.ones(3, 4)).sum().backward()
        record = self.model.all_reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.waits.append(record.seconds["agree"])


# Steps


def _ordinary_steps(rank: int, folder: Path, warn_after_seconds: float) -> int:
    training = _Training(folder, warn_after_seconds=warn_after_seconds)
    for _ in range(500):
        training.step()
    return _warnings_due(training.waits)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("warn_after_seconds", [WARN_SECONDS, 60.0])
def test_ordinary_steps_are_silent(world_size: int, warn_after_seconds: float, tmp_path: Path) -> None:
    _run_silently(_ordinary_steps, world_size, tmp_path, warn_after_seconds)


def _one_is_slower(rank: int, folder: Path) -> list[float]:
    training = _Training(folder)
    for _ in range(5):
        if rank == 1:
            time.sleep(SLOW_SECONDS)  # being slow is what is tested
        training.step()
    return training.waits


def _one_is_stopped_for_a_while(rank: int, folder: Path) -> list[float]:
    training = _Training(folder)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    for _ in range(4):
        if rank == 0:
            other = int(pids[1])
            os.kill(other, signal.SIGSTOP)
            threading.Timer(SLOW_SECONDS, os.kill, (other, signal.SIGCONT)).start()
        training.step()
    return training.waits


@pytest.mark.parametrize("slow", [_one_is_slower, _one_is_stopped_for_a_while])
def test_a_rank_that_keeps_others_waiting_for_less_than_the_limit_is_not_mentioned(
    slow: Callable[..., list[float]], tmp_path: Path
) -> None:
    (waits, _), said = _run(slow, 2, tmp_path)
    assert sum(waits) > 2 * SLOW_SECONDS  # it did wait
    assert len(said) <= _warnings_due(waits), said  # none, unless the machine made it late


def _late_early_calls(rank: int, folder: Path, wrappers: int) -> list[float]:
    trainings = [_Training(folder, early_calls=0) for _ in range(wrappers)]
    for _ in range(2):
        for training in trainings:
            if rank == 1:
                time.sleep(1.4 * WARN_SECONDS)  # compilation
            training.step()
    assert all(seconds > WARN_SECONDS for training in trainings for seconds in training.waits) or rank == 1
    for training in trainings:
        for _ in range(2):
            training.step()
    return []


@pytest.mark.parametrize("wrappers", [1, 2])
def test_nothing_is_said_of_a_wrapper_s_first_two_calls_however_long_they_take(wrappers: int, tmp_path: Path) -> None:
    _run_silently(_late_early_calls, 2, tmp_path, wrappers)


def _gan(rank: int, folder: Path) -> None:
    generator, critic = _Training(folder), _Training(folder)
    for _ in range(60):
        for _ in range(5):
            critic.step()
        generator.step()
        if rank == 1:
            with torch.no_grad():
                generator.model(torch.ones(3, 4))


def test_two_wrappers_that_take_different_numbers_of_steps_are_silent(tmp_path: Path) -> None:
    _run_silently(_gan, 2, tmp_path)


# Ranks that do something else meanwhile


def _evaluate(training: _Training, until: float, folder: Path) -> None:
    with torch.no_grad():
        while time.monotonic() < until:
            training.model(torch.ones(64, 4))


def _save(training: _Training, until: float, folder: Path) -> None:
    large = nn.Linear(2500, 2500)
    while time.monotonic() < until:
        torch.save(large.state_dict(), folder / "checkpoint.pt")


def _debug(training: _Training, until: float, folder: Path) -> None:
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


def _works_alone(rank: int, folder: Path, who: int, what: str) -> list[float]:
    training = _Training(folder)
    if rank == who:
        _OTHER_WORK[what][0](training, time.monotonic() + 3.2 * WARN_SECONDS, folder)
    training.step()
    return training.waits


@pytest.mark.parametrize("world_size, who", [(2, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize("what", _OTHER_WORK)
def test_a_rank_that_does_something_else_gets_a_line_that_says_what_and_no_report(
    world_size: int, who: int, what: str, tmp_path: Path
) -> None:
    results, said = _run(_works_alone, world_size, tmp_path, who, what)

    waits = results[who - 1]
    assert waits[-1] > 3 * WARN_SECONDS
    assert 1 <= len(said) <= _warnings_due(waits)
    where = _OTHER_WORK[what][1]
    for line in said:
        assert re.fullmatch(
            rf"legacy_ddp WARNING: all_reduce\(\) call 3, phase agree: ranks have waited for \d\.\d s; "
            rf"missing rank {who} \({where}\(\) call 2, at \S+:\d+ in \w+, on host \S+\), "
            "alive and getting on",
            line,
        ), line


# Leaving


def _leave_in_order(rank: int, folder: Path, order: tuple[int, ...]) -> None:
    training = _Training(folder)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in order]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    if place := order.index(rank):
        while Path(f"/proc/{int(pids[order[place - 1]])}").exists():
            _evaluate(training, time.monotonic() + 0.02, folder)
        if place == 1:
            _evaluate(training, time.monotonic() + 1.2 * WARN_SECONDS, folder)
    dist.destroy_process_group()


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_ranks_that_leave_one_after_the_other_are_not_missed(order: tuple[int, ...], tmp_path: Path) -> None:
    _run_silently(_leave_in_order, 3, tmp_path, order)


def _made_again(rank: int, folder: Path) -> list[tuple[list[str], int]]:
    left = []
    for number in range(3):
        training = _Training(folder)
        for _ in range(5):
            training.step()
        dist.destroy_process_group()
        left.append((_own_threads(), len(os.listdir("/proc/self/fd"))))
        store = f"file://{folder}/store-{number}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        training.step()  # the wrapper of before, on the group of now
    return left


@pytest.mark.skipif(not Path("/proc").exists(), reason="counts descriptors in /proc")
def test_process_groups_can_be_destroyed_and_made_again_silently(tmp_path: Path) -> None:
    for left in _run_silently(_made_again, 2, tmp_path):
        assert [threads for threads, _ in left] == [[]] * 3
        assert len({descriptors for _, descriptors in left}) == 1


def _terminated_after_a_group_is_gone(rank: int, folder: Path) -> None:
    first = _Training(folder)
    pair = dist.new_group([0, 1])
    first.model.process_group = pair
    first.step()
    first.model.process_group = None
    dist.destroy_process_group(pair)
    del pair
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def test_stacks_are_left_in_another_group_s_report_after_the_newest_group_was_destroyed(tmp_path: Path) -> None:
    run_ranks(partial(_listen, _terminated_after_a_group_is_gone, tmp_path), 2, lost=(1,))
    assert [STACKS in path.read_text() for path in _reports(tmp_path) if "-rank1-" in path.name] == [True]


# Child processes and signals


class _Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def _load(training: _Training) -> None:
    loader = DataLoader(
        _Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork", persistent_workers=True
    )
    for _ in range(2):
        for batch in loader:
            training.model(batch).sum().backward()
            training.step()
    for worker in multiprocessing.active_children():
        worker.terminate()
        worker.join()


def _pool(training: _Training) -> None:
    pool = multiprocessing.get_context("fork").Pool(2)
    assert pool.map(abs, [-1, -2]) == [1, 2]
    training.step()
    pool.terminate()
    pool.join()


def _fork(training: _Training) -> None:
    child = os.fork()
    if not child:
        signal.pause()
    training.step()
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def _has_children(rank: int, folder: Path, children: Callable[[_Training], None]) -> list[bool]:
    training = _Training(folder, uneven="allow")
    children(training)
    training.step()
    dist.barrier()
    return [STACKS in path.read_text() for path in _reports(folder)]


@pytest.mark.parametrize("children", [_load, _pool, _fork])
def test_child_processes_that_are_terminated_leave_no_trace(
    children: Callable[[_Training], None], tmp_path: Path
) -> None:
    for wrote_stacks in _run_silently(_has_children, 2, tmp_path, children):
        assert set(wrote_stacks) == {False}


def _exit_7(number: int, frame: object) -> None:
    sys.exit(7)


def _terminated(rank: int, folder: Path, handler: Any, moment: str) -> int:
    """Rank 1 gets SIGTERM; its handler is set before or after the wrapper is made."""
    heard: list[int] = []
    if handler == "note":
        handler = lambda number, _: heard.append(number)  # noqa: E731 - cannot travel to the rank
    if moment == "before":
        signal.signal(signal.SIGTERM, handler)
    training = _Training(folder)
    if moment == "after":
        signal.signal(signal.SIGTERM, handler)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    for _ in range(2):  # a handler must live through the first signal
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        elif handler is _exit_7 or handler == signal.SIG_DFL:
            while Path(f"/proc/{int(pids[1])}").exists():
                time.sleep(0.02)
            return 0
        training.step()
    return len(heard)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("handler, heard", [("note", 2), (signal.SIG_IGN, 0)])
def test_a_signal_that_the_user_handles_is_left_to_the_user(
    handler: Any, heard: int, moment: str, tmp_path: Path
) -> None:
    assert _run_silently(_terminated, 2, tmp_path, handler, moment) == [0, heard]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_user_s_handler_decides_the_exit_code(moment: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 died before returning: exit code 7$") as caught:
        _run_silently(_terminated, 2, tmp_path, _exit_7, moment)

    assert caught.value.ranks == (1,)
    assert [_said(tmp_path, rank) for rank in range(2)] == [[], []]
    assert _reports(tmp_path) == []


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("moment", ["never", "after"])
def test_a_process_without_a_handler_dies_of_the_signal_and_leaves_its_stacks(moment: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 died before returning: signal SIGTERM$"):
        _run(_terminated, 2, tmp_path, signal.SIG_DFL, moment)

    if moment == "never":  # who sets the default anew wants nothing else to happen
        (report,) = [path for path in _reports(tmp_path) if "-rank1-" in path.name]
        text = report.read_text()
        assert STACKS in text
        assert "in _terminated" in text


# What there is to see from outside


def _own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("legacy_ddp")]


def _sockets() -> tuple[int, int, int]:
    """Of this process: those that listen on every interface (gloo's do not), other TCP ones, others."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    listening, connected = 0, 0
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if rest[5] in own:
                is_ours = state == "0A" and not local.partition(":")[0].strip("0")
                listening, connected = listening + is_ours, connected + (not is_ours)
    return listening, connected, len(own) - listening - connected


def _footprint(rank: int, folder: Path, checks: Checks) -> list[Any]:
    others = _sockets()[2]
    training = _Training(None, **vars(checks))
    dist.barrier()
    during = _own_threads(), _sockets()[0], _sockets()[2] - others, len(_reports(folder))
    dist.barrier()
    dist.destroy_process_group()
    deadline = time.monotonic() + 10
    while _sockets()[1] and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's own end a little later
    listening, connected, rest = _sockets()
    assert training.model is not None  # a wrapper that lives on keeps nothing of it
    return [during, (_own_threads(), listening, connected, rest - others)]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks at sockets in /proc")
@pytest.mark.parametrize(
    "world_size, level, threads, files", [(2, "info", 1, 2), (2, "off", 0, 0), (1, "info", 0, 0), (1, "off", 0, 0)]
)
def test_threads_sockets_and_files_exist_only_where_ranks_look_after_each_other_and_go_with_the_group(
    world_size: int, level: str, threads: int, files: int, tmp_path: Path
) -> None:
    for during, after in _run_silently(_footprint, world_size, tmp_path, Checks(level=level, report_dir=tmp_path)):
        # one listening socket and a pair to wake its thread
        assert during == (["legacy_ddp watch"] * threads, threads, 2 * threads, files)
        assert after == ([], 0, 0, 0)
