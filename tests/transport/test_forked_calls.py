"""Calls in a forked child, on the process group of its parent: an error at once, and a job that goes on."""

import os
from collections.abc import Callable

import torch
from torch import nn

from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel, all_reduce_gradients
from legacy_ddp._transport import groups
from legacy_ddp.debug import check_replicas, cross_check
from tests.helpers.ranks import run_ranks


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


def _ends_of_children(rank: int) -> list[int]:
    model = LegacyDistributedDataParallel(nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    model.all_reduce()
    child = os.fork()
    if child == 0:
        groups._close_all(shows_exit=False)  # registered with atexit
        os._exit(0)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


def test_a_forked_child_leaves_the_groups_of_its_parent_alone_at_its_end(transport: str) -> None:
    """It waited for threads that only the parent has, or ended with SIGSEGV."""
    assert run_ranks(_ends_of_children, 2) == [[0], [0]]
