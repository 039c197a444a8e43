"""Attribution when several faults happen at once: the right rank, with the same text on all ranks."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, LostPeerError
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.small_models import error_of, step, wrap

CULPRIT = 2


def _loss_in(model: LegacyDistributedDataParallel) -> tuple[str, tuple[int, ...], str, float]:
    """What one more step raises: type, ranks, report and seconds."""
    start = time.monotonic()
    with pytest.raises(LostPeerError) as caught:
        step(model, 1.0)
    return type(caught.value).__name__, caught.value.ranks, caught.value.report, time.monotonic() - start


def _hangs_or_dies(rank: int, folder: str, how: str, warn: float, timeout: float) -> Any:
    """The warning and the final report fall due together."""
    model = wrap(timeout_seconds=timeout, checks=Checks(report_dir=folder, warn_after_seconds=warn))
    for _ in range(3):
        step(model, 1.0)
    if rank == CULPRIT:
        time.sleep(1.0)
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(timeout + 6)
        return None
    return _loss_in(model)


@pytest.mark.parametrize("how, warn, timeout", [("dies", 1.0, 30.0), ("hangs", 2.0, 2.0)])
def test_a_warning_that_falls_due_at_the_end_does_not_throw_the_final_report_away(
    how: str, warn: float, timeout: float, tmp_path: Path
) -> None:
    losses = run_ranks(_hangs_or_dies, 5, str(tmp_path), how, warn, timeout, lost=(CULPRIT,))

    kind, within = ("PeerLostError", 6.0) if how == "dies" else ("SyncTimeoutError", timeout + 5)
    assert len([loss for loss in losses if loss]) == 4
    _check(losses, kind, within)


def _check(losses: list[Any], kind: str, within: float) -> None:
    found = [loss for loss in losses if loss is not None]
    assert {(loss[0], loss[1]) for loss in found} == {(kind, (CULPRIT,))}
    assert len({loss[2] for loss in found}) == 1
    assert max(loss[3] for loss in found) < within


class _Interrupted(nn.Linear):
    """Ctrl-C while a call looks at the parameters."""

    comes = False

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        if self.comes:
            raise KeyboardInterrupt
        return super().named_parameters(*args, **kwargs)


def _interrupts_a_call_before_it_meets_anybody(rank: int, folder: str) -> Any:
    module = _Interrupted(2, 1, bias=False)
    model = LegacyDistributedDataParallel(module, timeout_seconds=2.0, checks=Checks(report_dir=folder))
    for _ in range(3):
        step(model, 1.0)
    if rank == CULPRIT:
        module.comes = True
        with pytest.raises(KeyboardInterrupt):
            model.all_reduce()
        module.comes = False
    step(model, 1.0)
    if rank == CULPRIT:
        time.sleep(8.0)
        return None
    return _loss_in(model)


def test_a_call_interrupted_before_it_meets_the_others_is_not_counted_by_that_rank_alone(tmp_path: Path) -> None:
    losses = run_ranks(_interrupts_a_call_before_it_meets_anybody, 3, str(tmp_path), lost=(CULPRIT,))

    _check(losses[:2], "SyncTimeoutError", 7.0)


def _fails_to_construct_and_serves_in_another_thread(rank: int, folder: str) -> Any:
    """Rank 0 fails to construct at first; another thread of rank 1 works while it waits in its call."""
    assert error_of(wrap, checks=Checks(report_dir=f"{folder}/file/inside" if rank == 0 else folder)) is not None
    model = wrap(timeout_seconds=2.0, checks=Checks(report_dir=folder))
    for _ in range(3):
        step(model, 1.0)
    if rank == CULPRIT:
        time.sleep(8.0)
        return None
    stop = threading.Event()

    def stay(*_: object) -> None:
        if threading.current_thread() is thread:
            stop.wait()

    model.module.register_forward_hook(stay)
    thread = threading.Timer(0.5, model, args=(torch.ones(1, 2),))
    if rank == 1:
        thread.start()
    loss = _loss_in(model)
    stop.set()
    return loss


def test_a_failed_first_call_and_work_of_another_thread_put_no_blame_on_their_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    losses = run_ranks(_fails_to_construct_and_serves_in_another_thread, 3, str(tmp_path), lost=(CULPRIT,))

    _check(losses[:2], "SyncTimeoutError", 7.0)


@on_ranks(2, [[2.0, 2.0]] * 2)
def test_a_repeated_call_of_all_ranks_is_no_extra_call_of_the_rank_without_a_kept_gradient(rank: int) -> list[float]:
    """A rank that keeps a gradient gets other memory, and forgot that it had called before."""
    model = LegacyDistributedDataParallel(nn.Linear(1, 1, bias=False))
    weight = model.module.weight
    weight.grad = torch.full_like(weight, 1.0 + 2 * rank)
    model.all_reduce()
    kept = weight.grad.detach() if rank == 0 else None
    model.all_reduce()
    return [weight.grad.item(), 2.0 if kept is None else kept.item()]
