"""``Checks(nonfinite="skip")``: all ranks skip the step of a rank with NaN or infinity."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, SyncRecord
from tests.helpers import logged_warnings
from tests.helpers.outcomes import attempt
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks

NAN = float("nan")
SKIP = Checks(nonfinite="skip")


class _Model(nn.Module):
    """A dense and a sparse gradient: the input, and ones in two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.rows = nn.Embedding(4, 1, sparse=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (self.weight * values).sum() + self.rows(torch.tensor([0, 2])).sum()


def _values(rank: int, value: float) -> torch.Tensor:
    return torch.tensor([1.0, value if rank == 1 else 1.0])


def _call(model: Any, rank: int, value: float, **arguments: Any) -> SyncRecord:
    """A step in which rank 1 has ``value`` in its gradient."""
    model.zero_grad()
    with model.no_sync():
        model(_values(rank, 1.0)).backward()
    if model._synchronizer.settings.reproducible:
        with model.no_sync():
            model(_values(rank, value)).backward()
    else:
        model(_values(rank, value)).backward()
    record: SyncRecord = model.all_reduce(**arguments)
    return record


def _grads(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.to_dense().flatten().tolist() for p in model.parameters()]


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings of the wrapper, arguments of the call
    "plain": ({}, {}),
    "weighted": ({}, {"sample_size": 2}),
    "in tree order": ({"reproducible": True}, {"sample_size": 2}),
    "detail": ({}, {}),
    "copies": ({"gradient_as_bucket_view": False}, {}),
}


def _skips(rank: int) -> dict[str, list[Any]]:
    """Records, gradients and warnings of a good, two bad and a good call, for every way."""
    found: dict[str, list[Any]] = {}
    for name, (settings, arguments) in WAYS.items():
        logged_warnings.listen()
        level = "detail" if name == "detail" else "info"
        module = _Model() if not settings.get("reproducible") else nn.Linear(2, 1, bias=False)
        model = LegacyDistributedDataParallel(module, checks=Checks(level, nonfinite="skip"), **settings)
        steps = []
        for value in (1.0, NAN, float("inf"), 1.0):
            record = _call(model, rank, value, metrics={"loss": rank + 1.0}, **arguments)
            steps.append((record.skipped, record.skipped_ranks, record.metrics["loss"], _grads(model)))
        found[name] = [steps, logged_warnings.take()]
    return found


@pytest.mark.unsimulated("it has no sparse tensors")
def test_all_ranks_skip_the_step_of_a_rank_with_a_nan_whatever_the_way() -> None:
    for found in run_ranks(_skips, 2):
        for name, (steps, warned) in found.items():
            (good, *bad, last) = steps
            assert [step[0] for step in steps] == [False, True, True, False], name
            assert good == last
            assert all(gradient is not None for gradient in good[3])
            for _, ranks, loss, grads in bad:
                assert (ranks, loss) == ((0, 1), 3.0)
                assert set(map(str, grads)) == {"None"}
            # Told once for the two calls in a row.
            (text,) = warned
            assert "all_reduce() call 2: non-finite gradients, found before they were exchanged:\n  rank 1: " in text
            assert "all ranks skip this step (1 until now): every .grad is None" in text


def _skips_for_ever(rank: int) -> list[str]:
    logged_warnings.listen()
    model = LegacyDistributedDataParallel(_Model(), checks=SKIP)
    for _ in range(12):
        _call(model, rank, NAN)
    return logged_warnings.take()


@pytest.mark.unsimulated("it has no sparse tensors")
def test_a_training_that_skips_for_ever_says_so_again() -> None:
    for first, later in run_ranks(_skips_for_ever, 2):
        assert "(1 until now)" in first
        assert "(10 until now)" in later


@on_ranks(2, [(1, True)] * 2)
def test_a_hook_does_not_see_the_nan_of_a_skipped_step(rank: int) -> tuple[int, bool]:
    """How often a hook ran in two calls, of which the first is bad, and whether the second was reduced."""
    logged_warnings.listen()
    model = LegacyDistributedDataParallel(nn.Linear(2, 1, bias=False), checks=SKIP)
    ran = []

    def hook(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        ran.append(bucket.buffer().clone())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.full((2,), 5.0))
        return future

    model.register_comm_hook(None, hook)
    _call(model, rank, NAN)
    _call(model, rank, 1.0)
    assert len(logged_warnings.take()) == 1
    return len(ran), _grads(model) == [[5.0, 5.0]]


def _has_scaler(rank: int, with_scaler: Sequence[int]) -> tuple[str, bool, float, list[Any]]:
    """The error, whether the call skipped, the scale and the weights after a step of a GradScaler."""
    logged_warnings.listen()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if rank in with_scaler else None
    model = LegacyDistributedDataParallel(
        nn.Linear(2, 1, bias=False), checks=Checks(nonfinite="skip", grad_scaler=scaler)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = model(_values(rank, float("inf"))).sum()
    (loss if scaler is None else scaler.scale(loss)).backward()
    records: list[SyncRecord] = []
    error = attempt(lambda: records.append(model.all_reduce()))
    before = model.module.weight.detach().clone()
    if scaler is not None and not error:
        scaler.step(optimizer)
        scaler.update()
    is_same = torch.equal(before, model.module.weight)
    skipped = bool(records) and records[0].skipped
    return str(error or ""), skipped, scaler.get_scale() if scaler else 0.0, [is_same, logged_warnings.take()]


def test_with_a_grad_scaler_on_all_ranks_the_scalers_skip_the_step() -> None:
    assert run_ranks(_has_scaler, 2, (0, 1)) == [("", False, 2.0, [True, []])] * 2


def test_a_grad_scaler_on_some_ranks_is_an_error_on_all() -> None:
    for error, *_ in run_ranks(_has_scaler, 2, (0,)):
        assert error.startswith("all_reduce() call 1: rank 1: non-finite gradients, and rank 1 without an enabled Grad")


def _refused(rank: int) -> list[str]:
    """The errors of a wrapper with another setting on rank 1, and of a setting without effect."""
    wrong = [SKIP if rank else Checks(), Checks("off", nonfinite="skip")]
    return [str(attempt(lambda c=checks: LegacyDistributedDataParallel(nn.Linear(1, 1), checks=c))) for checks in wrong]


def test_the_setting_must_be_equal_on_all_ranks_and_needs_checks() -> None:
    for different, off in run_ranks(_refused, 2):
        assert "setting 'nonfinite': rank 1 has skip; rank 0 has warn or ignore" in different
        assert "nonfinite='skip' has no effect at level 'off'" in off


def _skips_with_checks_off(rank: int) -> tuple[bool, list[Any], str, list[str]]:
    """A step with a NaN on rank 1, where the environment of rank 0 says off: the record, and what is told."""
    if rank == 0:
        os.environ["LEGACY_DDP_CHECKS"] = "off"
    model = LegacyDistributedDataParallel(nn.Linear(2, 1, bias=False), checks=SKIP)
    model(_values(rank, NAN)).backward()
    record = model.all_reduce()
    return record.skipped, _grads(model), str(record), logged_warnings.take()


def test_checks_that_the_environment_switches_off_still_skip_a_step_and_the_record_says_why() -> None:
    """The variable dropped the setting without a word, and a record said that no rank took part."""
    for skipped, grads, text, told in run_ranks(_skips_with_checks_off, 2):
        assert (skipped, grads) == (True, [None])
        assert text.startswith(
            "call 1: all ranks skipped this step, because of NaN or infinity on rank 1, every .grad is None"
        )
        assert "took no part" not in text
        assert len(told) == 1
