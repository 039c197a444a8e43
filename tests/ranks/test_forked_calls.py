"""Forked children of a rank: a call is an error at once, a child ends as it wants to, and the job goes on.

Run as a script, this file is a job of two ranks, and their children: ``test_forked_calls.py STORE``.
"""

import atexit
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel, PeerError, all_reduce_gradients
from legacy_ddp.debug import check_replicas, cross_check
from tests.helpers.processes import slowness
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import run_script


def _in_a_child(*calls: Callable[[], object]) -> list[str]:
    """The texts of the errors of ``calls`` in a forked child, with P and C for the numbers of parent and child."""
    reading, writing = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        try:
            texts = "\n".join(map(_error_of, calls))
            os.write(writing, texts.replace(str(parent), "P").replace(str(os.getpid()), "C").encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as told:
        texts = told.read().split("\n")
    assert os.waitpid(child, 0)[1] == 0
    return texts


def _error_of(call: Callable[[], object]) -> str:
    try:
        return repr(call())
    except LegacyDDPError as error:
        return str(error)


def _calls_in_children(rank: int) -> tuple[list[str], list[float]]:
    net = nn.Linear(2, 1, bias=False)
    texts = _in_a_child(lambda: LegacyDistributedDataParallel(nn.Linear(2, 1)))  # before any call of the parent
    model = LegacyDistributedDataParallel(net)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        model.all_reduce()
    texts += _in_a_child(
        lambda: LegacyDistributedDataParallel(nn.Linear(2, 1)),
        model.all_reduce,
        lambda: all_reduce_gradients(nn.Linear(2, 1)),
        model.broadcast_parameters,
        model.broadcast_buffers,
        lambda: check_replicas(model),
        lambda: cross_check(model, print, torch.ones(1)),
    )
    model.all_reduce()
    return texts, net.weight.grad[0].tolist()


CALLS = (
    "construction",
    "construction",
    "all_reduce()",
    "all_reduce()",
    "broadcast_parameters()",
    "broadcast_buffers()",
    "check_replicas()",
    "cross_check()",
)


def test_a_call_in_a_forked_child_is_an_error_at_once(transport: str) -> None:
    """It waited for ever: the threads of the group are in the parent alone."""
    for texts, grad in run_ranks(_calls_in_children, 2):
        assert grad == [1.5, 1.5]
        assert [text.partition(": ")[0] for text in texts] == list(CALLS)
        for text in texts:
            assert "got the call in process C" in text
            assert "expected it in process P" in text


def _end_of_a_child(rank: int) -> float:
    """The seconds that a child takes for its end after an error of all ranks, while the rank at fault lives."""
    model = LegacyDistributedDataParallel(nn.Linear(2, 1))
    with pytest.raises(PeerError):
        model.all_reduce(sample_size=-1 if rank == 0 else 1)
    start, child = time.monotonic(), os.fork()
    if child == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    seconds = time.monotonic() - start
    dist.barrier()
    return seconds


def test_a_forked_child_does_not_wait_for_the_end_of_other_ranks() -> None:
    """It waited up to 11 s: it inherited the order of ends after the error."""
    assert max(run_ranks(_end_of_a_child, 2, fresh=True)) < 5.0 * slowness()


# Of the children of rank 0: whether the library has groups, what ends the child, and its exit code.
ENDS = (
    (False, "sys.exit(3)", 3),
    (True, "sys.exit(3)", 3),
    (True, "the end of the script", 0),
    (True, "an exception", 1),
    (True, "destroyed groups", 0),
)


def _run_job(store: str) -> str:
    """One of two ranks, until its end; in a child of rank 0: what shall end it."""
    rank = int(os.fork() == 0)  # before the groups: no child in the sense of this test
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    KEPT.append(dist.new_group())
    dist.all_reduce(torch.ones(1), group=KEPT[0])
    for has_wrapper, end, _ in ENDS:
        if has_wrapper and len(KEPT) == 1:
            model = LegacyDistributedDataParallel(nn.Linear(2, 1))
            model(torch.ones(1, 2)).sum().backward()
            model.all_reduce()
            KEPT.append(model)
        if rank == 0:
            child = os.fork()
            if child == 0:
                return end
            print(has_wrapper, end, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=", ", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        os.wait()
    return ""


def test_a_forked_child_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    """It ended with SIGSEGV, and before the first call it waited for ever, as with torch alone: at the end of the
    interpreter torch waits for the threads of its groups, which only the parent has."""
    done = run_script(__file__, str(tmp_path / "store"))

    assert done.stdout.splitlines() == [", ".join(map(str, end)) for end in ENDS], done.stderr
    assert done.returncode == 0


if __name__ == "__main__":
    KEPT: list[Any] = []  # until the interpreter ends
    match _run_job(sys.argv[1]):
        case "sys.exit(3)":
            sys.exit(3)
        case "an exception":
            raise ValueError("of a child")
        case "destroyed groups":
            dist.destroy_process_group()
