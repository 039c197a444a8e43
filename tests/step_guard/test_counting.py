"""The quick look whether any gradient waits for a call, while other threads make wrappers."""

import threading

import torch

from legacy_ddp._step_guard.backward_counter import BackwardCounter, is_any_counting


class _NoResult:
    """The place of a gradient before the first call."""

    version = 0
    view = None

    def is_in(self, grad: torch.Tensor) -> bool:
        return grad is None


def test_the_look_is_safe_while_other_threads_make_counters() -> None:
    """optimizer.step() raised "Set changed size during iteration"."""
    is_over = threading.Event()

    def make() -> None:
        while not is_over.is_set():
            kept = [BackwardCounter(guarded=True) for _ in range(20)]
            del kept

    maker = threading.Thread(target=make)
    maker.start()
    try:
        for _ in range(20_000):
            is_any_counting()
    finally:
        is_over.set()
        maker.join()


def test_a_count_is_seen_until_its_reset_and_not_after_the_end_of_its_counter() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    counter = BackwardCounter(guarded=True)
    counter.attach(["weight"], [parameter], [_NoResult()])
    before = is_any_counting()
    parameter.sum().backward()
    assert is_any_counting()
    counter.reset()
    assert is_any_counting() == before

    parameter.sum().backward()
    del counter
    assert is_any_counting() == before
