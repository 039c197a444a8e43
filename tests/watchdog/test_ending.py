"""The error that ends a process, behind the exit code that came of it, and what other ranks are told about an end.

Run as a script, this file is a job of two ranks for every end in ENDS: ``test_ending.py FOLDER``.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from legacy_ddp import LegacyDistributedDataParallel, PeerLostError
from legacy_ddp._watchdog.ending import error_behind
from tests.helpers.scripts import run_script


def _caught(cause: BaseException | None, context: BaseException | None, code: object) -> BaseException:
    end = SystemExit(code)
    end.__context__ = context
    if cause is not None:
        end.__cause__ = cause
    return end


_ERROR, _OTHER = ValueError("bad batch"), KeyError("other")


@pytest.mark.parametrize(
    "end, expected",
    [
        (_caught(None, _ERROR, 1), _ERROR),
        (_caught(_ERROR, _OTHER, 3), _ERROR),
        (_caught(None, _caught(None, _ERROR, 1), 2), _ERROR),  # an exit code of an exit code
        (_ERROR, _ERROR),
    ],
)
def test_an_exit_code_leads_to_the_error_behind_it(end: BaseException, expected: BaseException) -> None:
    assert error_behind(end) is expected


@pytest.mark.parametrize(
    "end",
    [
        _caught(None, None, 1),
        _caught(None, StopIteration(), 0),  # a normal end
        _caught(None, StopIteration(), None),
        _caught(None, _ERROR, "no data in /data"),  # says more than the error behind it
    ],
)
def test_an_exit_that_says_enough_stays(end: BaseException) -> None:
    assert error_behind(end) is end


def test_a_circle_of_causes_ends() -> None:
    first, second = SystemExit(1), SystemExit(2)
    first.__cause__, second.__cause__ = second, first

    assert error_behind(first) is first


LEFT = "left after all_reduce() call 1"
# What ends rank 1, and what rank 0 is told.
ENDS = {
    "sys.exit(3)": f"{LEFT} with exit status 3",
    "sys.exit() with a text": f"{LEFT} with SystemExit: no data in /data",
    "sys.exit(0)": f"{LEFT} normally",
    "SystemExit": f"{LEFT} with SystemExit: its status is not known here",
    "an exception": f"{LEFT} with ValueError: bad batch",
    "the end of the script": f"{LEFT} normally",
    "os._exit()": "its process has ended",
}


def _run_jobs(folder: Path) -> str:
    """A job per end, all at the same time: the text of the error on rank 0. In rank 1: what shall end it."""
    jobs = []
    for number, end in enumerate(ENDS):
        jobs.append([])
        for rank in (0, 1):
            jobs[-1].append(os.fork())
            if jobs[-1][-1] == 0:
                _train(rank, folder / str(number), number)
                return end
    for first, second in jobs:
        os.waitpid(first, 0)
        os.kill(second, signal.SIGKILL)  # the rest of its end says nothing more
        os.waitpid(second, 0)
    return ""


def _train(rank: int, store: Path, number: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = LegacyDistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    model.all_reduce()
    if rank == 0:
        try:
            model.all_reduce()
        except PeerLostError as error:
            print(number, " ".join(str(error).split()), flush=True)
        os._exit(0)


def test_the_other_ranks_are_told_the_exit_status_of_a_script(tmp_path: Path) -> None:
    """``sys.exit(1)`` read "left normally; did it run out of data?"."""
    done = run_script(__file__, str(tmp_path))

    for told, expected in zip(sorted(done.stdout.splitlines()), ENDS.values(), strict=True):
        assert f"missing rank 1 ({expected}" in told


if __name__ == "__main__":
    match _run_jobs(Path(sys.argv[1])):
        case "sys.exit(3)":
            sys.exit(3)
        case "sys.exit() with a text":
            sys.exit("no data in /data")
        case "sys.exit(0)":
            sys.exit(0)
        case "SystemExit":
            raise SystemExit(3)
        case "an exception":
            raise ValueError("bad batch")
        case "os._exit()":
            os._exit(3)
