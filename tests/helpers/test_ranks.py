"""run_ranks: the rank to blame in every way a rank can fail, and which processes are kept for further jobs."""

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.modules.module import register_module_forward_hook

from tests.helpers.rank_pool import RankPool
from tests.helpers.ranks import RankFailure, run_ranks
from tests.helpers.small_sizes import move_gradients_from
from tests.helpers.tiers import thorough


def _sum_of_ranks(rank: int) -> float:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return total.item()


def _identity(rank: int) -> int:
    return rank


def _raise_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("the planted error")
    dist.all_reduce(torch.zeros(1))


def _fail_pytest(rank: int) -> None:
    pytest.fail("the planted failure")


def _warn(rank: int) -> None:
    warnings.warn("the planted warning", stacklevel=1)


def _die_on(guilty: int, how: str, rank: int) -> int:
    if rank != guilty:
        return rank
    if how == "_exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, how))
    return rank


def _wait_for_ever_in_a_named_function() -> None:
    threading.Event().wait()


def _hang_in_collective_on_rank_1(rank: int) -> None:
    if rank == 1:
        dist.all_reduce(torch.zeros(1))
    _wait_for_ever_in_a_named_function()


def _raise_on_first_hang_on_others(rank: int) -> None:
    if rank == 0:
        raise ValueError("the planted error")
    _wait_for_ever_in_a_named_function()


def _hang_on_exit(rank: int) -> None:
    Finalize(None, _wait_for_ever_in_a_named_function, exitpriority=100)


def _pid(rank: int) -> int:
    return os.getpid()


def _random_number(rank: int) -> float:
    return torch.rand(()).item()


_CHANGES: dict[str, Callable[[], object]] = {
    "thread": lambda: threading.Thread(target=time.sleep, args=(2.0,)).start(),
    "descriptor": lambda: os.open("/dev/null", os.O_RDONLY),
    "environment": lambda: os.environ.setdefault("LEFT_BY_A_JOB", "1"),
    "folder": lambda: os.chdir("/"),
    "stderr": lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2),
    "signal": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "limit": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000)),
    "excepthook": lambda: setattr(sys, "excepthook", print),
    "logger": lambda: logging.getLogger("legacy_ddp").setLevel(logging.INFO),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "module hook": lambda: register_module_forward_hook(lambda *_: None),
    "constant": lambda: move_gradients_from(1),
    "process group": lambda: dist.new_group([dist.get_rank()], use_local_synchronization=True),
    "child": lambda: subprocess.Popen(["sleep", "2"]),
}


def _change(rank: int) -> int:
    """Leave a change in the process: of each rank but the last, another one."""
    if rank < len(_CHANGES):
        list(_CHANGES.values())[rank]()
    return os.getpid()


def _survive_lost_peer(rank: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.zeros(1))
    return type(caught.value).__name__


def _die_at_exit_on(guilty: int, how: str, rank: int) -> None:
    if rank == guilty:
        Finalize(None, partial(_die_on, guilty, how, rank), exitpriority=100)


def _store_is_lost(rank: int) -> bool:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        _get_default_store().get("never set")
    return True


class Failing(NamedTuple):
    """A job, its number of ranks and its options; what the failure says, and the ranks that it names."""

    job: Callable[[int], object]
    size: int
    words: str
    ranks: tuple[int, ...]
    options: Mapping[str, Any] = MappingProxyType({})


_SOON, _LOST = {"timeout_seconds": 0.5}, {"lost": (1,)}
FAILING = {
    "raises": Failing(_raise_on_rank_1, 3, r"\n\nrank 1 raised\nTraceback(.|\n)*in _raise_on(.|\n)*ValueErr", (1,)),
    "fails a check of pytest": Failing(_fail_pytest, 1, "the planted failure", (0,)),
    "warns": Failing(_warn, 1, "UserWarning: the planted warning", (0,)),
    "exits": Failing(partial(_die_on, 1, "_exit"), 2, "rank 1 died before returning: exit code 3", (1,)),
    "is killed": Failing(partial(_die_on, 1, "SIGKILL"), 2, "rank 1 died before returning: signal SIGKILL", (1,)),
    "is stuck in a collective": Failing(
        _hang_in_collective_on_rank_1,
        2,
        r"rank 0 hung(.|\n)*_wait_for_ever_in_a_named_function(.|\n)*rank 1 hung(.|\n)*in all_reduce",
        (0, 1),
        _SOON,
    ),
    "is stopped": Failing(partial(_die_on, 1, "SIGSTOP"), 2, r"rank 1 hung\n\(no stack", (1,), _SOON),
    "hangs after a failure": Failing(
        _raise_on_first_hang_on_others, 2, r"rank 1 hung \(perhaps because of the failure above\)", (0, 1)
    ),
    "cannot exit": Failing(_hang_on_exit, 1, "rank 0 did not exit after returning", (0,), {**_SOON, "fresh": True}),
    "cannot start": Failing(_identity, 2, "did not start", (0, 1), {"start_seconds": 0.0}),
    "is broken": Failing(partial(_die_at_exit_on, 0, "_exit"), 1, "rank 0 died after returning: exit code 3", (0,)),
    "raises although lost": Failing(_raise_on_rank_1, 2, "the planted error", (1, 0), _LOST),
    "survives and cannot exit": Failing(_hang_on_exit, 2, "rank 0 did not exit after returning", (0,), _LOST),
    "survives and dies": Failing(
        partial(_die_at_exit_on, 0, "SIGABRT"), 2, "rank 0 died after returning: signal SIGABRT", (0,), _LOST
    ),
}


def _leave_pid(job: Callable[[int], object], folder: Path, rank: int) -> object:
    (folder / str(os.getpid())).touch()
    return job(rank)


@pytest.mark.parametrize("name", [thorough(name) if name == "survives and cannot exit" else name for name in FAILING])
def test_a_failure_names_the_rank_and_what_happened_to_it_and_no_process_survives(name: str, tmp_path: Path) -> None:
    failing = FAILING[name]
    with pytest.raises(RankFailure, match=failing.words) as caught:
        run_ranks(partial(_leave_pid, failing.job, tmp_path), failing.size, **failing.options)

    assert caught.value.ranks[: len(failing.ranks)] == failing.ranks
    assert _alive(int(path.name) for path in tmp_path.iterdir()) == []


def test_ranks_may_be_lost() -> None:
    assert run_ranks(_survive_lost_peer, 2, lost=(1,)) == ["RuntimeError", None]
    assert run_ranks(_hang_on_exit, 2, lost=(1,), survivors_exit=False) == [None, None]
    for how in ("SIGKILL", "SIGSTOP"):
        assert run_ranks(partial(_die_on, 0, how), 2, lost=(0,)) == [None, 1]
    assert run_ranks(partial(_die_on, 0, "SIGABRT"), 2, lost=(0, 1)) == [None, 1]
    assert run_ranks(_identity, 2, lost=(1,)) == [0, 1]


def test_ranks_may_meet_in_a_store_of_rank_0_which_is_lost_with_it() -> None:
    assert run_ranks(_sum_of_ranks, 3, store="rank0") == [3.0] * 3
    assert run_ranks(_store_is_lost, 2, lost=(0,), store="rank0") == [None, True]


def _alive(pids: Iterable[int]) -> list[int]:
    """The processes that are running, or ended and were not waited for."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


# Processes that are kept


def test_processes_run_several_jobs_which_start_with_the_same_random_number() -> None:
    first = run_ranks(_pid, 2)

    assert run_ranks(_random_number, 2) == run_ranks(_random_number, 2, fresh=True) == run_ranks(_random_number, 2)
    assert set(run_ranks(_pid, 2)) == set(first)
    assert set(run_ranks(_pid, 3)) > set(first)


def test_a_process_that_a_job_changed_is_not_kept() -> None:
    *changed, unchanged = run_ranks(_change, len(_CHANGES) + 1)

    assert {what: pid for what, pid in zip(_CHANGES, changed, strict=True) if _alive([pid])} == {}
    assert run_ranks(_pid, 1) == [unchanged]


def test_a_process_that_died_between_two_jobs_fails_the_next_job() -> None:
    pool = RankPool()
    (process,) = pool.take(1, "cpu", fresh=False)
    pool.give_back(process)
    os.kill(process.process.pid, signal.SIGSEGV)
    process.process.join()

    with pytest.raises(AssertionError, match="a rank died after 0 jobs: got exit code -11"):
        pool.take(1, "cpu", fresh=False)
