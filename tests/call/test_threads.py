"""Several threads with one model: backward passes, no_sync() blocks, micro-batches of a reproducible step."""

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import fork_script
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.torch_versions import without_gloo_lines

STEPS = 35


def test_backward_passes_of_two_and_four_threads_lose_nothing_and_keep_the_heap_whole() -> None:
    done = fork_script("-m", "tests.helpers.stress_threads", str(STEPS))

    assert (done.returncode, done.stderr) == (0, "")
    assert without_gloo_lines(done.stdout).splitlines() == [
        f"{form}, {threads} threads: {STEPS} steps" for form in ("each", "shared", "function") for threads in (2, 4)
    ]


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
    raised = []

    def micro_batch() -> None:
        with suppress(LegacyDDPError):
            try:
                with model.no_sync():
                    model(torch.ones(1, 1)).sum().backward()
            except LegacyDDPError as error:
                raised.append(str(error))
                raise

    with model.no_sync():
        if rank == 1:
            _in_thread(micro_batch)
        model(torch.ones(1, 1)).sum().backward()
    text = ""
    try:
        model.all_reduce(sample_size=1)
    except LegacyDDPError as error:
        text = f"{type(error).__name__} {error}"
    model.zero_grad()
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    model.all_reduce(sample_size=2)
    return "".join(raised), text, model.module.weight.grad.flatten().tolist()


def test_a_block_of_a_second_thread_inside_one_of_a_reproducible_step_is_an_error_on_all_ranks() -> None:
    (raised_0, text_0, next_0), (raised_1, text_1, next_1) = run_ranks(_reproducible_blocks, 2)

    assert raised_0 == ""
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
