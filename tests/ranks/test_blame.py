"""Attribution when several faults happen at once: the right rank, with the same text on all ranks."""

import logging
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
from tests.helpers.tiers import thorough

CULPRIT = 2
Lost = tuple[str, tuple[int, ...], str, float] | None


def _wrap(folder: str, *, timeout: float = 30.0, warn: float = 60.0) -> LegacyDistributedDataParallel:
    return wrap(timeout_seconds=timeout, checks=Checks(report_dir=folder, warn_after_seconds=warn))


def _loss_in(model: LegacyDistributedDataParallel) -> Lost:
    """What one more step raises: type, ranks, report and seconds."""
    start = time.monotonic()
    try:
        step(model, 1.0)
    except LostPeerError as error:
        return type(error).__name__, error.ranks, error.report, time.monotonic() - start
    return None


def _check(losses: list[Lost], kind: str, ranks: tuple[int, ...], within: float) -> None:
    found = [loss for loss in losses if loss is not None]
    assert {(loss[0], loss[1]) for loss in found} == {(kind, ranks)}
    assert len({loss[2] for loss in found}) == 1
    assert max(loss[3] for loss in found) < within


# A warning and the final report fall due together


def _hangs_or_dies(rank: int, folder: str, how: str, warn: float, timeout: float) -> Lost:
    model = _wrap(folder, timeout=timeout, warn=warn)
    for _ in range(3):
        step(model, 1.0)
    if rank == CULPRIT:
        time.sleep(1.0)
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(timeout + 6)
    return _loss_in(model)


@pytest.mark.parametrize("how, warn, timeout", [("dies", 1.0, 30.0), thorough("dies", 0.95, 30.0), ("hangs", 2.0, 2.0)])
def test_a_warning_that_falls_due_at_the_end_does_not_throw_the_final_report_away(
    how: str, warn: float, timeout: float, tmp_path: Path
) -> None:
    losses = run_ranks(_hangs_or_dies, 5, str(tmp_path), how, warn, timeout, lost=(CULPRIT,))

    kind, within = ("PeerLostError", 6.0) if how == "dies" else ("SyncTimeoutError", timeout + 5)
    assert len([loss for loss in losses if loss]) == 4
    _check(losses, kind, (CULPRIT,), within)


# Said once


def _outlives(rank: int, folder: str) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("legacy_ddp").addHandler(handler)
    model = _wrap(folder)
    step(model, 1.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert _loss_in(model) is not None
    return said


def test_the_only_neighbour_of_a_killed_rank_says_so_once_though_it_loses_two_connections(tmp_path: Path) -> None:
    said = run_ranks(_outlives, 2, str(tmp_path), lost=(1,))[0]

    assert len([line for line in said if line.startswith("rank 1 ended unexpectedly")]) <= 1


# Calls that only one rank counts


def _fails_to_construct_at_first(rank: int, folder: str) -> Lost:
    assert error_of(_wrap, f"{folder}/file/inside" if rank == 0 else folder) is not None
    model = _wrap(folder, timeout=2.0)
    for _ in range(3):
        step(model, 1.0)
    if rank == CULPRIT:
        time.sleep(8.0)
        return None
    return _loss_in(model)


def test_a_first_call_that_failed_on_one_rank_alone_does_not_put_the_blame_on_it_later(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    losses = run_ranks(_fails_to_construct_at_first, 3, str(tmp_path), lost=(CULPRIT,))

    _check(losses[:2], "SyncTimeoutError", (CULPRIT,), 7.0)


def _interrupts_a_call_before_it_meets_anybody(rank: int, folder: str) -> Lost:
    model = _wrap(folder, timeout=2.0)
    for _ in range(3):
        step(model, 1.0)
    if rank == 0:
        with pytest.raises(KeyboardInterrupt):
            model.all_reduce(sample_size=_Interrupts())
    step(model, 1.0)
    if rank == CULPRIT:
        time.sleep(8.0)
        return None
    return _loss_in(model)


class _Interrupts:
    """Ctrl-C while the arguments are looked at."""

    def __index__(self) -> int:
        raise KeyboardInterrupt


def test_a_call_interrupted_before_it_meets_the_others_is_not_counted_by_that_rank_alone(tmp_path: Path) -> None:
    losses = run_ranks(_interrupts_a_call_before_it_meets_anybody, 3, str(tmp_path), lost=(CULPRIT,))

    _check(losses[:2], "SyncTimeoutError", (CULPRIT,), 7.0)


# Other threads


def _serves_in_another_thread(rank: int, folder: str) -> Lost:
    model = _wrap(folder, timeout=2.0)
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
    thread = threading.Timer(0.5, model, args=(torch.ones(1, 2),))  # when this rank waits in its call
    if rank == 1:
        thread.start()
    loss: Any = _loss_in(model)
    stop.set()
    return loss


def test_a_rank_that_waits_is_not_missing_because_another_thread_of_it_works(tmp_path: Path) -> None:
    losses = run_ranks(_serves_in_another_thread, 3, str(tmp_path), lost=(CULPRIT,))

    _check(losses[:2], "SyncTimeoutError", (CULPRIT,), 7.0)


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
