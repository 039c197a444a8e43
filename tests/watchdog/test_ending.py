"""The error that ends a process, behind the exit code that came of it, and what other ranks are told about an end.

Run as a script, this file is a job of two ranks for every named end of ENDS: ``test_ending.py FOLDER END...``.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from legacy_ddp import LegacyDistributedDataParallel, PeerLostError
from tests.helpers.scripts import run_script
from tests.helpers.tiers import thorough

LEFT, LEFT_WELL = "left after all_reduce() call 1 with", "left without an error after all_reduce() call 1,"
PLACE = "at test_ending.py:N in"
# What ends rank 1, and what rank 0 is told.
ENDS = {
    "sys.exit(3)": f"{LEFT} exit status 3, {PLACE} <module>",
    "sys.exit() with a text": f"{LEFT} SystemExit: no data in /data, {PLACE} <module>",
    "sys.exit(0)": f"{LEFT_WELL} by sys.exit(0) {PLACE} <module>",
    "SystemExit": f"{LEFT} SystemExit: its status is not known here",
    "an exception": f"{LEFT} ValueError: bad batch, {PLACE} <module>",
    "an exception of json": f"{LEFT} JSONDecodeError: Expecting value: line 1 column 1 (char 0), {PLACE} <module>",
    "the end of the script": f"{LEFT_WELL} at the end of its script",
    "os._exit()": "its process has ended",
    "a handler from before": f"{LEFT_WELL} at the end of its script, after SIGTERM",
    "a handler from later": f"{LEFT_WELL} by sys.exit() {PLACE} <module>; its script handles SIGTERM",
    "sys.exit(0) in a handler": f"{LEFT_WELL} by sys.exit(0) {PLACE} _leave, after SIGUSR1",
    "an exception of a handler": f"{LEFT} ValueError: preempted, {PLACE} _fail, after SIGUSR1",
    # Behind an exit code, as torch.multiprocessing makes one of an error, stands the error.
    "an exit code with a cause": f"{LEFT} ValueError: bad batch",
    "a text after an error": f"{LEFT} SystemExit: no data in /data, {PLACE} _end_with",
    "a success after an error": f"{LEFT_WELL} at the end of its script",
    "a circle of causes": f"{LEFT} exit status 1, {PLACE} _end_with",
}


def _do_nothing(*_: object) -> None:
    pass


def _leave(*_: object) -> None:
    sys.exit(0)


def _fail(*_: object) -> None:
    raise ValueError("preempted")


def _send_myself(number: signal.Signals, handler: Callable[..., None] | None = None) -> None:
    if handler is not None:
        signal.signal(number, handler)
    signal.raise_signal(number)


def _end_with(code: object, context: BaseException | None, cause: BaseException | None = None) -> NoReturn:
    """As a script that destroys its group in a ``finally``: the error is still under way."""
    try:
        raise _exit_with(code, context, cause)
    finally:
        dist.destroy_process_group()


def _exit_with(code: object, context: BaseException | None, cause: BaseException | None = None) -> SystemExit:
    end = SystemExit(code)
    end.__context__ = context
    if cause is not None:
        end.__cause__ = cause
    return end


def _run_jobs(folder: Path, ends: Sequence[str]) -> str:
    """A job per end, all at the same time: the text of the error on rank 0. In rank 1: what shall end it."""
    jobs = []
    for number, end in enumerate(ends):
        jobs.append([])
        for rank in (0, 1):
            jobs[-1].append(os.fork())
            if jobs[-1][-1] == 0:
                if end == "a handler from before":
                    signal.signal(signal.SIGTERM, _do_nothing)
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


USUAL = ["sys.exit(3)", "an exception", "os._exit()", "a handler from before", "sys.exit(0) in a handler"]


@pytest.mark.parametrize("ends", [USUAL, thorough([end for end in ENDS if end not in USUAL])])
def test_the_other_ranks_are_told_the_exit_status_of_a_script(ends: list[str], tmp_path: Path) -> None:
    """``sys.exit(1)``, and later an end after a SIGTERM, read "left normally; did it run out of data?"."""
    told = dict(line.split(" ", 1) for line in run_script(__file__, str(tmp_path), *ends).stdout.splitlines())

    assert len(told) == len(ends)
    for number, expected in enumerate(map(ENDS.__getitem__, ends)):
        text = re.sub(r"\.py:\d+", ".py:N", told[str(number)])
        assert f"missing rank 1 ({expected}, on host" in text, text
        assert ("Possible reasons:" in text) is (expected.startswith(LEFT_WELL) and "after SIG" not in expected)


if __name__ == "__main__":
    match _run_jobs(Path(sys.argv[1]), sys.argv[2:]):
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
        case "an exception of json":
            json.loads("")
        case "os._exit()":
            os._exit(3)
        case "a handler from before":
            _send_myself(signal.SIGTERM)
        case "a handler from later":
            _send_myself(signal.SIGTERM, _do_nothing)
            sys.exit()
        case "sys.exit(0) in a handler":
            _send_myself(signal.SIGUSR1, _leave)
        case "an exception of a handler":
            _send_myself(signal.SIGUSR1, _fail)
        case "an exit code with a cause":
            _end_with(2, KeyError("other"), _exit_with(1, ValueError("bad batch")))
        case "a text after an error":
            _end_with("no data in /data", ValueError("bad batch"))
        case "a success after an error":
            _end_with(0, StopIteration())
        case "a circle of causes":
            other = SystemExit(2)
            other.__cause__ = _exit_with(1, None, other)
            _end_with(1, None, other)
