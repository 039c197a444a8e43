"""Effects of the watchdog on its process: children, signal handlers, threads, sockets, files."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from legacy_ddp import Checks
from tests.helpers.listening import Training, listen, own_threads, reports, run_silently, said
from tests.helpers.processes import open_files
from tests.helpers.ranks import RankFailure, run_ranks
from tests.helpers.tiers import thorough

STACKS = "most recent call first"  # as faulthandler writes them


class _Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def _load(training: Training) -> None:
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


def _fork(training: Training) -> None:
    begun, begins = os.pipe()
    child = os.fork()
    if not child:
        os.write(begins, b"1")
        signal.pause()
    os.read(begun, 1)  # before its hooks of fork have run, a child has the signal handling of its parent
    os.close(begun)
    os.close(begins)
    training.step()
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def _has_children(rank: int, folder: Path, children: Callable[[Training], None]) -> list[bool]:
    training = Training(folder, uneven="allow")
    children(training)
    training.step()
    dist.barrier()
    return [STACKS in path.read_text() for path in reports(folder)]


@pytest.mark.parametrize("children", [_load, _fork])
def test_child_processes_that_are_terminated_leave_no_trace(
    children: Callable[[Training], None], tmp_path: Path
) -> None:
    for wrote_stacks in run_silently(_has_children, 2, tmp_path, children):
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
    training = Training(folder)
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


@pytest.mark.parametrize("moment", [thorough("before"), "after"])
@pytest.mark.parametrize("handler, heard", [("note", 2), (signal.SIG_IGN, 0)])
def test_a_signal_that_the_user_handles_is_left_to_the_user(
    handler: Any, heard: int, moment: str, tmp_path: Path
) -> None:
    assert run_silently(_terminated, 2, tmp_path, handler, moment) == [0, heard]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("moment", ["before", thorough("after")])
def test_the_user_s_handler_decides_the_exit_code(moment: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 died before returning: exit code 7$") as caught:
        run_silently(_terminated, 2, tmp_path, _exit_7, moment)

    assert caught.value.ranks == (1,)
    assert [said(tmp_path, rank) for rank in range(2)] == [[], []]
    assert reports(tmp_path) == []


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("moment", ["never", "after"])
def test_a_process_without_a_handler_dies_of_the_signal_and_leaves_its_stacks(moment: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 died before returning: signal SIGTERM$"):
        run_silently(_terminated, 2, tmp_path, signal.SIG_DFL, moment)

    if moment == "never":  # who sets the default anew wants nothing else to happen
        (report,) = [path for path in reports(tmp_path) if "-rank1-" in path.name]
        text = report.read_text()
        assert STACKS in text
        assert "in _terminated" in text


def _terminated_after_a_group_is_gone(rank: int, folder: Path) -> None:
    first = Training(folder)
    pair = dist.new_group([0, 1])
    first.model.process_group = pair
    first.step()
    first.model.process_group = None
    dist.destroy_process_group(pair)
    del pair
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def test_stacks_are_left_in_another_group_s_report_after_the_newest_group_was_destroyed(tmp_path: Path) -> None:
    run_ranks(partial(listen, _terminated_after_a_group_is_gone, tmp_path), 2, lost=(1,))
    assert [STACKS in path.read_text() for path in reports(tmp_path) if "-rank1-" in path.name] == [True]


def _sockets() -> tuple[int, int, int]:
    """Of this process: those that listen on every interface (gloo's do not), other TCP ones, Unix ones."""
    own = {link[len("socket:[") : -1] for link in open_files() if link.startswith("socket:[")}
    listening, connected = 0, 0
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if rest[5] in own:
                is_ours = state == "0A" and not local.partition(":")[0].strip("0")
                listening, connected = listening + is_ours, connected + (not is_ours)
    # by their own table: gloo closes TCP sockets of its start while this looks, and these are in no table
    unix = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    return listening, connected, len(own & unix)


def _footprint(rank: int, folder: Path, checks: Checks) -> list[Any]:
    others = _sockets()[2]
    training = Training(None, **vars(checks))
    dist.barrier()
    during = own_threads(), _sockets()[0], _sockets()[2] - others, len(reports(folder))
    dist.barrier()
    dist.destroy_process_group()
    deadline = time.monotonic() + 10
    while _sockets()[1] and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's own end a little later
    listening, connected, rest = _sockets()
    assert training.model is not None  # a wrapper that lives on keeps nothing of it
    return [during, (own_threads(), listening, connected, rest - others)]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks at sockets in /proc")
@pytest.mark.parametrize(
    "world_size, level, watches, files", [(2, "info", 1, 2), (2, "off", 0, 0), (1, "info", 0, 0), (1, "off", 0, 0)]
)
def test_threads_sockets_and_files_exist_only_where_ranks_look_after_each_other_and_go_with_the_group(
    world_size: int, level: str, watches: int, files: int, tmp_path: Path
) -> None:
    for during, after in run_silently(_footprint, world_size, tmp_path, Checks(level=level, report_dir=tmp_path)):
        # one listening socket and a pair to wake its thread; a thread in reserve; a connection between the ranks, and a
        # Unix socket for `legacy-ddp watch`
        assert during == (["legacy_ddp watchdog"] * 2 * watches, watches, 3 * watches + world_size - 1, files)
        assert after == ([], 0, 0, 0)
