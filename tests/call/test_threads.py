"""Several threads with one model: backward passes, no_sync() blocks, micro-batches of a reproducible step."""

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn

from legacy_ddp import GradientError, LegacyDistributedDataParallel, all_reduce_gradients
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.small_models import Said, error_of
from tests.helpers.tiers import thorough

STEPS = 35
WIDTH = 768  # 4.5 MiB of weights in fp64: they move to their slots during backward, and an addition takes a while


def _net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Embedding(16, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(*layers).double()


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _expected(net: nn.Module, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One thread, without the library."""
    alone = copy.deepcopy(net)
    for batch in batches:
        _loss(alone, batch).backward()
    return [parameter.grad.to_dense() for parameter in alone.parameters()]


def _tasks(form: str, model: nn.Module, batches: Sequence[torch.Tensor]) -> list[Callable[[], object]]:
    if form == "shared":
        return [_loss(model, batch).backward for batch in batches]
    return [lambda batch=batch: _loss(model, batch).backward() for batch in batches]


def _run_together(tasks: Sequence[Callable[[], object]]) -> None:
    """Run all tasks at the same time, the last one in this thread."""
    barrier = threading.Barrier(len(tasks))

    def run(task: Callable[[], object]) -> None:
        barrier.wait()
        task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        others = [pool.submit(run, task) for task in tasks[:-1]]
        run(tasks[-1])
    for other in others:
        other.result()


def _catch(task: Callable[[], object]) -> None:
    with suppress(InterruptedError):
        task()


def _break_one(form: str, model: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    """An exception ends one of the passes at the embedding, behind the linear layer."""
    layer = getattr(model, "module", model)[0]
    turns = iter([True])

    def break_off(_: torch.Tensor) -> None:
        if next(turns, False):
            raise InterruptedError

    handle = layer.weight.register_hook(break_off)
    _run_together([partial(_catch, task) for task in _tasks(form, model, batches)])
    handle.remove()
    with pytest.raises(GradientError, match=r"an exception ended a backward\(\) half-way"):
        all_reduce_gradients(model) if form == "function" else model.all_reduce()
    model.zero_grad()


def _stress(_: int, form: str, threads: int) -> None:
    net = _net()
    batches = [torch.arange(4) + 3 * thread for thread in range(threads)]
    expected = _expected(net, batches)
    wrapped = None
    for step in range(STEPS):
        if step % 20 == 0 and form != "function":  # the first passes after construction are the dangerous ones
            wrapped = LegacyDistributedDataParallel(net, checks="off")
        is_second_try = step % 8 == 7
        if is_second_try:
            _break_one(form, wrapped or net, batches)
        _run_together(_tasks(form, wrapped or net, batches))
        record = all_reduce_gradients(net) if wrapped is None else wrapped.all_reduce()
        for parameter, sum_alone in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.to_dense(), sum_alone, rtol=1e-9, atol=1e-12)
        # In several threads a second try may count together with the first.
        assert wrapped is None or is_second_try or record.rows[0].micro_batches == threads
        net.zero_grad(set_to_none=step % 4 != 3)


@pytest.mark.parametrize("transport", ["host"], indirect=True)  # a single rank: there is nothing to exchange
@pytest.mark.parametrize("form", [thorough("each"), "shared", thorough("function")])
def test_backward_passes_of_two_and_four_threads_lose_nothing_and_keep_the_heap_whole(
    transport: str, form: str
) -> None:
    """In "each" every thread runs forward and backward. In "shared" the main thread runs all forward passes, and each
    thread one of the backward passes. "function" is "each" on a module without a wrapper.

    Before some steps an exception ends the pass of one thread half-way: the call refuses these gradients, and clearing
    them is enough. The exit code of the rank would show a corrupted heap.
    """
    for threads in (2, 4):
        run_ranks(_stress, 1, form, threads, fresh=True)


def _in_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


@on_ranks(2, [(False, True, [1.5])] * 2)  # the mean of 1 and 2
def test_no_sync_blocks_of_two_threads_that_overlap_do_not_leave_synchronisation_off(
    rank: int,
) -> tuple[bool, bool, list[float]]:
    """A block that begins in another thread's block, and ends after it."""
    model = LegacyDistributedDataParallel(nn.Linear(1, 1, bias=False))
    first, second = model.no_sync(), model.no_sync()
    first.__enter__()
    _in_thread(second.__enter__)
    first.__exit__(None, None, None)
    model(torch.full((1, 1), 1.0 + rank)).sum().backward()
    during = model.all_reduce().synchronized
    _in_thread(lambda: second.__exit__(None, None, None))
    return during, model.all_reduce().synchronized, model.module.weight.grad.flatten().tolist()


def _reproducible_blocks(rank: int) -> tuple[str, str, list[float]]:
    model = LegacyDistributedDataParallel(nn.Linear(1, 1, bias=False), reproducible=True)
    raised: list[Said] = []

    def micro_batch() -> None:
        with model.no_sync():
            model(torch.ones(1, 1)).sum().backward()

    with model.no_sync():
        if rank == 1:
            _in_thread(lambda: raised.append(error_of(micro_batch)))
        model(torch.ones(1, 1)).sum().backward()
    kind, text = error_of(model.all_reduce, sample_size=1)
    model.zero_grad()
    micro_batch()
    model.all_reduce(sample_size=2)
    return str(raised), f"{kind} {text}", model.module.weight.grad.flatten().tolist()


def test_a_block_of_a_second_thread_inside_one_of_a_reproducible_step_is_an_error_on_all_ranks() -> None:
    (raised_0, text_0, next_0), (raised_1, text_1, next_1) = run_ranks(_reproducible_blocks, 2)

    assert raised_0 == "[]"
    assert "a block of another thread was open" in raised_1
    assert text_0 == text_1
    assert text_0.startswith("PeerError")
    assert "rank 1" in text_0
    assert next_0 == next_1 == [0.5]  # (1 + 1) / (2 + 2): nothing is left of the step that failed


@pytest.mark.usefixtures("alone")
def test_a_gradient_dropped_by_one_thread_and_made_anew_by_another_counts_once() -> None:
    model = LegacyDistributedDataParallel(nn.Linear(1, 1, bias=False))
    for _ in range(3):
        model.zero_grad()
        _in_thread(lambda: model(torch.ones(1, 1)).sum().backward())
        model(torch.ones(1, 1)).sum().backward()

    assert model.all_reduce().rows[0].micro_batches == 2
