"""A program: threads run backward on one model at the same time, and every gradient must be the sum of all passes.

    python -m tests.helpers.stress_threads STEPS

For 2 and 4 threads and every form: in "each": every thread runs forward and backward; in "shared" the main
thread runs all forward passes, and one of the backward passes; "function" is "each" on a module without a wrapper.
Before some steps an exception ends the pass of one thread half-way: the call refuses these gradients, and clearing them
is enough. The exit code shows a corrupted heap, too.
"""

import copy
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import GradientError, LegacyDistributedDataParallel, all_reduce_gradients

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

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks[:-1]]
    for thread in threads:
        thread.start()
    run(tasks[-1])
    for thread in threads:
        thread.join()


class _BrokenError(Exception):
    pass


def _break_one(form: str, model: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    """An exception ends one of the passes at the embedding, behind the linear layer."""
    layer = getattr(model, "module", model)[0]
    turns = iter([True])

    def break_off(_: torch.Tensor) -> None:
        if next(turns, False):
            raise _BrokenError

    def caught(task: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            with suppress(_BrokenError):
                task()

        return run

    handle = layer.weight.register_hook(break_off)
    _run_together([caught(task) for task in _tasks(form, model, batches)])
    handle.remove()
    try:
        all_reduce_gradients(model) if form == "function" else model.all_reduce()
    except GradientError as error:
        assert "an exception ended a backward() half-way" in str(error)  # noqa: PT017 - no test of pytest
    else:
        raise AssertionError("half a backward was averaged")
    model.zero_grad()


def _stress(form: str, threads: int, steps: int) -> None:
    net = _net()
    batches = [torch.arange(4) + 3 * thread for thread in range(threads)]
    expected = _expected(net, batches)
    wrapped = None
    for step in range(steps):
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


def main(steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for form in ("each", "shared", "function"):
        for threads in (2, 4):
            _stress(form, threads, steps)
            print(f"{form}, {threads} threads: {steps} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
